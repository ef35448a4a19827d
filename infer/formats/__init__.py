"""Read, check, write and export drafters in the layouts of this and other projects. A layout is the
set of config.json keys and tensor names that one project uses.

This package may import infer.config, utils, ngrams, targets and drafters. The code that reads and
writes a layout is in the drafter family that uses it. Start reading at checkpoint.py.
"""
