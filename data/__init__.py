"""Read text data; return packed training sequences, evaluation prompts and question sets.

This package contains no model and no training loop. It imports nothing from `train`, and only
infer.utils.chat_template from `infer`. Start with rows.py (reads examples from files), then chat.py
(converts records of all formats to one form of example), template.py (applies the chat template)
and packing.py (packs tokens into training sequences).
"""
