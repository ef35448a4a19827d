"""Drafters on disk: read, check, write and export the checkpoints of this and other projects, and
read drafters from the Hugging Face hub. A layout is the set of config.json keys and tensor names
that one project uses.

This package may import infer.config, utils, ngrams, targets and drafters. The code of each layout
is in the drafter families. Start reading at checkpoint.py.
"""
