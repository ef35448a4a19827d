"""Optional package: targets and drafters in 8-bit integers on a CPU (README.md). The core reaches
it through the table of `infer.kernels` and through `infer.targets.loading.load_int8_package`; start
reading at `kernels.py`."""
