# The operator's image.
#
#     docker build -t ddpjob-operator:0.1.0 .
#
# The layers are the dependencies and the code. A change of the code changes only the last, small layer.
ARG BUILD_IMAGE=python:3.11-bookworm
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BUILD_IMAGE} AS build
ENV PIP_ROOT_USER_ACTION=ignore PIP_NO_WARN_SCRIPT_LOCATION=1
RUN python -m venv --without-pip /opt/venv
WORKDIR /src

# Only the dependencies, each with the version and the hashes of its lock (make locks).
COPY operator/*.lock ./
RUN pip install --quiet --require-hashes -r build.lock \
 && pip --python /opt/venv/bin/python install --quiet --no-compile --require-hashes -r requirements.lock \
# Byte code of the whole kubernetes package would double its 60 MB. Only imported modules are compiled.
 && /opt/venv/bin/python -c "import kopf, typer, jinja2, prometheus_client, pythonjsonlogger.json, \
kubernetes.aio.config, kubernetes.aio.client.api_client, kubernetes.aio.client.rest"

# The code is installed into its own root, from which it is copied as a layer.
COPY operator/ .
COPY LICENSE /LICENSE
RUN pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels . \
 && pip --python /opt/venv/bin/python install --quiet --no-deps --root /layer /wheels/ddpjob-*.whl

FROM ${BASE_IMAGE}
COPY --from=build /opt/venv /opt/venv
COPY --from=build /layer /
# kopf needs the user's name. A uid that a cluster chooses has none, so the variables set it.
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 USER=ddpjob LOGNAME=ddpjob
USER 65532:65532
ENTRYPOINT ["ddpjob"]
CMD ["operator"]
