# The cloud tier. From the root of a checkout:
#   docker build -f deploy/containers/cloud.Dockerfile -t registry.example/overspill-cloud:0.1.0 .
# torch's default wheels bring CUDA; for a smaller image without, let pip find CPU builds: --build-arg PIP_ARGS="--index-url …".
# Its router is compiled (docs/install.md), which takes some minutes: --build-arg COMPILE=0 leaves it interpreted.
ARG PYTHON=python:3.11-slim
FROM ${PYTHON} AS build
ARG PIP_ARGS=""
ARG EXTRA=cloud
ARG COMPILE=1
RUN if [ "${COMPILE}" != 0 ]; then apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev; fi
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE overspill.py ./
COPY router router
COPY models models
COPY hardware_profiles hardware_profiles
COPY edge_agent edge_agent
COPY cloud_tier cloud_tier
RUN python -m venv /opt/overspill \
 && OVERSPILL_COMPILE=${COMPILE} /opt/overspill/bin/pip install --no-cache-dir ${PIP_ARGS} ".[${EXTRA}]"

FROM ${PYTHON}
COPY --from=build /opt/overspill /opt/overspill
RUN useradd --system --uid 10001 --user-group --home-dir /tmp --shell /usr/sbin/nologin overspill
ENV PATH=/opt/overspill/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OVERSPILL_MODELS=/models
USER 10001:10001
EXPOSE 8700
STOPSIGNAL SIGTERM
ENTRYPOINT ["overspill"]
CMD ["cloud", "serve", "--config", "/etc/overspill/cloud.toml"]
