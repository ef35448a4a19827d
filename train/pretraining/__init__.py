"""Training of small language models in one process, without an engine: the embedded target's
pre-training. May import infer, data and train's top; nothing of train but train.masked imports it.
Start with single.py (the steps), then language_model.py (`./launch.sh pretrain`)."""
