"""The DART family: its drafter in model.py, its layouts of config.json in layouts.py. An optional
package, named in infer/drafters/families.py. May import what `infer.drafters` may, and the modules
of `infer.drafters`. Start reading at model.py."""
