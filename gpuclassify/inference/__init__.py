"""Models on a worker, from tokens to outputs, without Dask and dataframes; read `engine.py` first.

Most of what a run needs is handed from call to call. Five things cannot be, because code of other
libraries or of the user lies between the two ends; each is a context variable, which holds for one
thread and ends with its ``with`` block:

- `workers.run_context.run_context`: a job's task counts what the mappers within it do, and how far
  its part has come.
- `tokenizing.prefetch.shared_tokens`: mappers that run over one partition share its tokens;
  each reads the store once, and hands it to its `TokenSource`.
- `inference.packed.disentangled.reference_forward`: DeBERTa's encoder, deep in a transformers
  model, runs transformers' own code.
- `inference.layer_states.current_states`: a layer, deep in a model, returns what an equal layer of
  another model has computed.
- `inference.packed.layout.current_layout`: an attention function, which transformers
  calls, knows where the texts of the batch lie.
"""
