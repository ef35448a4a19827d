"""Read, check, write and export drafters in the layouts of this and other projects. A layout is the
set of config.json keys and tensor names that one project uses.

This package may import infer.config, utils, ngrams, targets and drafters. The code of each layout
is in the drafter families. Start reading at checkpoint.py.
"""
