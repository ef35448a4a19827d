"""Drafters on disk: folders and hub ids in any public layout are read, checked, written and
exported.

May import infer.config, utils, ngrams, targets and drafters, whose families know their own layouts.
Start reading at checkpoint.py.
"""
