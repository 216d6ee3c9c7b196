"""`trellis serve`: a model over HTTP, whose sessions are states of fixed size.

engine.py       one thread that owns the model and decodes many sessions together
states.py       the states that clients can name, in memory and in files
schema.py       what requests may say
chat.py         conversations as text, by the tokenizer's template
observer.py     the memory of one layer and head while a text is read
metrics.py      what /metrics tells
service.py      the parts together, and how clients see a model and a state
answers.py      requests for text, from jobs to answers and streams
documents.py    uploads of states, and documents to read
errors.py       what clients are told where something is wrong
guard.py        who may ask, and how much
api.py          the HTTP interface
server.py       opens a model and serves it until a signal
page/           the page at /
"""
