"""Trains several recipes in one launch of torchrun: worker.py JOBS, a JSON list of jobs."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from trellis.training.recipe import from_dict
from trellis.training.run import train

dist.init_process_group("gloo")
for table, run, resume in json.loads(Path(sys.argv[1]).read_text()):
    train(from_dict(table), Path(run), resume)
dist.destroy_process_group()
