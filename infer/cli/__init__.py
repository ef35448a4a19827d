"""The commands except training: each file defines an option dataclass and a function `run`. This
package may import `data` and every package of infer except the optional packages. infer.main
imports a command's file when the command is called. Read generate.py, the simplest command, first;
models.py loads targets and drafters."""
