"""Text in, training rows, prompts and question sets out. Knows no model and no loop.
Imports neither infer nor train, but for infer.utils.chat_template.
Start with rows.py (where rows come from), then chat.py (chat templates) and packing.py (tokens)."""
