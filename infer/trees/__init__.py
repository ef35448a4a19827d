"""Build draft trees from a drafter's token probabilities. The functions run no model.

Start reading at methods.py, which contains the table of tree methods. Then read tree.py. This
package may import infer.utils, infer.ngrams and infer.attention.
"""
