"""What runs on a worker: texts to tokens to batches to outputs. Knows no dataframe and no Dask."""
