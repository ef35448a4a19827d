"""The DART drafter family: model.py contains the drafter, and layouts.py reads config.json. This
package may be missing from an installation (see infer/drafters/families.py). It may import the
modules of `infer.drafters`, and whatever these may import. Start reading at model.py."""
