"""The fields of Kubernetes' kinds, and deep specs of users checked against them."""

from graphlib import TopologicalSorter

import yaml

from ddpjob import DDPJob
from ddpjob.core.api.kinds import kinds

# Keys chosen by users, and values of every kind of a pod's fields, deep within it.
DEEP = """
env:
- {name: A, valueFrom: {fieldRef: {fieldPath: "metadata.labels['a.b/c']"}}}
- {name: B, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: 1m}}}
- {name: C, valueFrom: {secretKeyRef: {name: s, key: k, optional: true}}}
- {name: D, valueFrom: {configMapKeyRef: {name: c, key: k}}}
resources:
  limits: {cpu: 1, hugepages-2Mi: 4Mi, example.com/device: 1}
volumes:
- name: csi
  csi: {driver: a.b, volumeAttributes: {any.key/of: users}, nodePublishSecretRef: {name: s}}
- name: own
  ephemeral:
    volumeClaimTemplate:
      metadata: {labels: {a.b/c: d}}
      spec:
        accessModes: [ReadWriteOnce]
        resources: {requests: {storage: 1Gi}}
        selector: {matchLabels: {a.b/c: d}, matchExpressions: [{key: a, operator: Exists}]}
        dataSourceRef: {apiGroup: a.b, kind: Snapshot, name: s}
- name: all
  projected:
    defaultMode: 420
    sources:
    - configMap: {name: c, items: [{key: k, path: p, mode: 256}]}
    - secret: {name: s, optional: true}
    - downwardAPI: {items: [{path: p, fieldRef: {fieldPath: metadata.name}}]}
    - serviceAccountToken: {path: p, audience: a, expirationSeconds: 600}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
      - matchExpressions: [{key: a.b/c, operator: In, values: [d]}]
        matchFields: [{key: metadata.name, operator: In, values: [n]}]
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 1
      podAffinityTerm: {topologyKey: zone, labelSelector: {matchLabels: {a.b/c: d}}}
podTemplate:
  metadata: {labels: {a.b/c: d}, annotations: {any/key: of users}}
  spec:
    nodeSelector: {a.b/c: d}
    hostAliases: [{ip: 10.0.0.1, hostnames: [a]}]
    dnsConfig: {nameservers: [10.0.0.2], options: [{name: ndots, value: "1"}]}
    resourceClaims: [{name: gpu, resourceClaimTemplateName: t}]
    securityContext:
      sysctls: [{name: net.core.somaxconn, value: "1"}]
      seLinuxOptions: {level: s0}
      seccompProfile: {type: Localhost, localhostProfile: p}
    containers:
    - name: trainer
      securityContext: {capabilities: {add: [IPC_LOCK]}, runAsUser: 5}
      lifecycle: {preStop: {exec: {command: [sync]}}}
    - name: sidecar
      image: i
      ports: [{containerPort: 80, protocol: TCP}]
      livenessProbe: {httpGet: {path: /, port: 80, httpHeaders: [{name: A, value: b}]}}
      resources: {claims: [{name: gpu, request: one}]}
"""


def test_a_kind_is_never_within_itself():
    # A check of a spec would have no end.
    TopologicalSorter({kind: filter(None, kinds()[kind].values()) for kind in kinds()}).prepare()


def test_known_fields_and_keys_of_users_are_accepted_in_any_depth():
    DDPJob.create("digits", image="i", args=["a.py"], **yaml.safe_load(DEEP))
