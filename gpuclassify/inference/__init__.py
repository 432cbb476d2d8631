"""Models on a worker, from tokens to outputs, without Dask and dataframes; read `engine.py` first.

A run passes most of its state as arguments. Six values cannot be passed, because code of another
library or of the user lies between the two ends. Each is a context variable, which is set for one
thread and ends with its ``with`` block. The list names the variables and, for private ones, the
function that sets them:

- `workers.run_context.run_context`: the counts and the progress of the part that a job's task is
  working on.
- `tokenizing.prefetch.current_store`: the tokens that mappers over one partition share.
- `mapping.runners.current_run_windows`: the function that runs a mapper's windows. It is replaced
  while mappers run one after another, so that models with equal layers can run in step.
- `inference.packed.disentangled.reference_forward`: whether DeBERTa's encoder, inside a
  transformers model, runs transformers' own code.
- `inference.layer_states.current_states`: the hidden states that a layer takes from an equal layer
  of another model instead of computing them.
- `inference.packed.layout.current_layout`: the offsets of the batch's texts, read by the attention
  function and the hooks that transformers' code calls, and by DeBERTa's encoder.
"""
