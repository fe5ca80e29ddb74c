# docker build -f docker/cpu.Dockerfile -t fastfold:cpu .
# docker run --rm -v "$PWD:/data" fastfold:cpu infer protein.fasta --out results
FROM python:3.12-slim

# The wheels of PyTorch without CUDA, which are a tenth of the size; docs/install.md says where they are.
ARG TORCH_INDEX
WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE NOTICE ./
COPY docs/package_index.md docs/
COPY fastfold fastfold
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$(sed -n 's/^torch==//p' constraints.txt)" \
    && pip install --no-cache-dir --constraint constraints.txt . \
    && fastfold verify --device cpu

WORKDIR /data
ENTRYPOINT ["fastfold"]
