"""Read text data; return packed training sequences, evaluation prompts and question sets.

This package knows no model and no training loop. Of `infer` and `train` it imports only
infer.utils.chat_template. Start with rows.py (reads examples from files), then chat.py (converts
every layout to one form), template.py (applies the chat template) and packing.py (packs tokens).
"""
