"""The API server of these tests can be taken away and comes back as it was."""

from pathlib import Path

import pytest
from envtest import ApiServer


def test_a_killed_api_server_comes_back_with_its_data(apiserver: ApiServer, namespace: str) -> None:
    before = apiserver.kubeconfig.read_text()
    apiserver.kill()
    with pytest.raises(OSError, match="Connection refused"):
        apiserver.request("GET", f"/api/v1/namespaces/{namespace}")
    apiserver.start()
    assert apiserver.request("GET", f"/api/v1/namespaces/{namespace}").code == 200
    assert apiserver.kubeconfig.read_text() == before


def test_a_certificate_that_is_not_written_yet_is_not_used(tmp_path: Path) -> None:
    server = ApiServer(tmp_path, {"kubectl": "kubectl"})
    server.certificate.parent.mkdir()
    server.certificate.touch()
    assert not server._has_certificate()
    server.certificate.write_text("-----BEGIN CERTIFICATE-----\nMII\n-----END CERTIFICATE-----\n")
    assert server._has_certificate()
