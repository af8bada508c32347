{{- define "ddpjob.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "ddpjob.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The labels of an object. Those of the chart cannot be replaced by commonLabels. */}}
{{- define "ddpjob.labels" -}}
{{- $own := include "ddpjob.ownLabels" . | fromYaml }}
{{- toYaml (merge $own .Values.commonLabels) }}
{{- end }}

{{- define "ddpjob.ownLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "ddpjob.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: ddpjob
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* The annotations of an object: its own, as a dict in the list after the root, and those of all. */}}
{{- define "ddpjob.annotations" -}}
{{- $root := index . 0 }}
{{- with merge (deepCopy (index . 1)) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "ddpjob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "ddpjob.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "ddpjob.image" -}}
{{- $registry := default .Values.image.registry .Values.global.imageRegistry }}
{{- $repository := .Values.image.repository }}
{{- if $registry }}
{{- $repository = printf "%s/%s" (trimSuffix "/" $registry) $repository }}
{{- end }}
{{- if .Values.image.digest }}
{{- printf "%s@%s" $repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{/* Refuse values that contradict each other. The schema could refuse them only without a reason. */}}
{{- define "ddpjob.checkValues" -}}
{{- if and .Values.watchNamespaces .Values.excludedNamespaces }}
{{- fail "excludedNamespaces cannot be combined with watchNamespaces, which lists all namespaces that the operator watches: remove one of the two values" }}
{{- end }}
{{- end }}

{{/* The operator's rights in the namespaces of the jobs. Those on the Lease are separate. */}}
{{- define "ddpjob.rules" -}}
- apiGroups: [ddpjob.dev]
  resources: [ddpjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [ddpjob.dev]
  resources: [ddpjobs/status]
  verbs: [update]
# patch gives a pod that stays for another attempt its label and its assignment.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete, patch]
# The agent of the pods is in a ConfigMap. get is limited to it: its name has the hash of its
# content. A create cannot be limited by name.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create]
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [{{ .Files.Get "files/agent-config-map" | trim }}]
  verbs: [get]
- apiGroups: [""]
  resources: [services]
  verbs: [get, create]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [ddpjob-installation]
  verbs: [get, update]
# Gangs that are scheduled whole: by Kubernetes itself, Volcano or the plugin coscheduling. Harmless without them.
- apiGroups: [scheduling.k8s.io, scheduling.volcano.sh, scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.kueue.enabled }}
# The operator asks queues for the room of jobs, and gives it back. The finalizer holds a Workload until no pod uses its room.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads/status]
  verbs: [patch]
# A LocalQueue `default` takes jobs without a queue: they get its label.
- apiGroups: [kueue.x-k8s.io]
  resources: [localqueues]
  verbs: [list, watch]
- apiGroups: [ddpjob.dev]
  resources: [ddpjobs]
  verbs: [patch]
{{- end }}
{{- end }}

{{/* What the operator does with jobs that have the label of a queue. */}}
{{- define "ddpjob.queues" -}}
{{- if not .Values.kueue.enabled }}off{{ else if .Values.kueue.clusterRead }}on{{ else }}refused{{ end }}
{{- end }}

{{/* Cluster-wide names contain the namespace, because releases in two namespaces may have the same name. */}}
{{- define "ddpjob.clusterName" -}}
{{- printf "%s-%s" (include "ddpjob.fullname" .) .Release.Namespace }}
{{- end }}

{{- define "ddpjob.leaseName" -}}
{{- printf "%s-lease" (include "ddpjob.fullname" .) }}
{{- end }}
