"""Optional package: run targets and drafters with int8 weights on a CPU (see README.md).

The rest of `infer` uses this package through `infer.kernels.table` and
`infer.targets.loading.load_int8_package`. Start reading at `kernels.py`.
"""
