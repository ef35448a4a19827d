"""Drafters on disk: read, check, write and export folders in any public layout, and read drafters
from the Hugging Face hub.

This package may import infer.config, utils, ngrams, targets and drafters. The code of each layout
is in the drafter families. Start reading at checkpoint.py.
"""
