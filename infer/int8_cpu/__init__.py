"""Optional package: targets and drafters in 8-bit integers on a CPU (see README.md).

The rest of `infer` uses this package through `infer.kernels.table` and
`infer.targets.loading.load_int8_package`. Start reading at `kernels.py`.
"""
