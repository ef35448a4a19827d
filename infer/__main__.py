"""`python -m infer COMMAND [overrides]` is the command `blockdraft`."""

from infer.main import main

if __name__ == "__main__":
    main()
