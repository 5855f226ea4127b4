"""Be a rank that runs the doctor: ``_rank.py VARIABLES PROGRAM [option ...]``, with environment
variables in JSON and a program that makes this rank otherwise than others are.
"""

import json
import os
import sys

import torch

from gradcomp.doctor.__main__ import main

variables, first, *options = sys.argv[1:]
os.environ.update(json.loads(variables))
torch.set_num_threads(1)
exec(first, {})
sys.exit(main(options))
