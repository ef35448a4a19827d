"""Make `python -m infer COMMAND [KEY=VALUE ...]` run the same commands as `blockdraft`."""

from infer.main import main

if __name__ == "__main__":
    main()
