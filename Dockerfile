# An image with gpuclassify, for CPUs by default. Build it in a checkout:
#   docker build --tag gpuclassify .
#   docker build --tag gpuclassify --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker run --rm --gpus all --volume "$PWD:/work" gpuclassify classify in/ out/ --classifier quality
# For cudf frames or several GPUs, add "gpu" to EXTRAS.
FROM debian:bookworm-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=dedup,fasttext,s3,safety,sentencepiece
ENV PATH=/opt/gpuclassify/bin:$PATH
COPY constraints.txt setup.cfg setup.py pyproject.toml README.md LICENSE /src/
COPY gpuclassify /src/gpuclassify
RUN apt-get update
RUN apt-get install --yes --no-install-recommends ca-certificates python3-venv
RUN python3 -m venv /opt/gpuclassify
# Builds of torch for one device have longer versions than the index's, so pip prefers them.
RUN /opt/gpuclassify/bin/pip install --no-cache-dir --constraint /src/constraints.txt --extra-index-url $TORCH_INDEX torch
RUN /opt/gpuclassify/bin/pip install --no-cache-dir --constraint /src/constraints.txt "/src[$EXTRAS]"
WORKDIR /work
ENTRYPOINT ["gpuclassify"]
