"""Measurements of causal language models: ours, and any of transformers.

models.py opens a model, scoring.py asks it for likelihoods and greedy text, runner.py measures
what is missing and keeps results as files. Each task is one module or folder beside them.
"""
