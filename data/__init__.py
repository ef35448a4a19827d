"""Text in, training examples and prompts out. Knows no model and no loop."""
