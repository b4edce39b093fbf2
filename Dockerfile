# maple serve for an exported model, on a CPU, without torch:
#   docker build -t maple .
#   docker run --read-only --cap-drop ALL -p 127.0.0.1:8000:8000 -v "$PWD/model.onnx:/model/model.onnx:ro" maple
FROM python:3.11-slim AS build
WORKDIR /source
RUN python -m venv /opt/maple
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
RUN /opt/maple/bin/pip install --no-cache-dir --constraint constraints.txt '.[onnxruntime,serve]'

FROM python:3.11-slim
COPY --from=build /opt/maple /opt/maple
ENV PATH=/opt/maple/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /model
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["maple", "serve"]
CMD ["/model/model.onnx", "--host", "0.0.0.0"]
