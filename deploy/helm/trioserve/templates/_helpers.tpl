{{/* Names leave space for suffixes: 63 characters at most, and 52 for a StatefulSet, which LeaderWorkerSet creates for
each engine. */}}
{{- define "trioserve.name" -}}
{{- $name := ternary .Release.Name (printf "%s-trioserve" .Release.Name) (contains "trioserve" .Release.Name) -}}
{{- $name | trunc (ternary 34 50 (gt (int .Values.engine.nodes) 1)) | trimSuffix "-" -}}
{{- end -}}

{{/* Argument of the templates below: a list of the root, and "router", "engine", or "worker" for engine pods that do not
serve. */}}
{{- define "trioserve.selector" -}}
app.kubernetes.io/name: trioserve
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Selector of all router pods, or of all pods of engines. */}}
{{- define "trioserve.labelSelector" -}}
{{- $root := index . 0 -}}
{{- if and (ne (index . 1) "router") (gt (int $root.Values.engine.nodes) 1) -}}
matchLabels:
  app.kubernetes.io/name: trioserve
  app.kubernetes.io/instance: {{ $root.Release.Name }}
matchExpressions:
  - { key: app.kubernetes.io/component, operator: In, values: [engine, worker] }
{{- else -}}
matchLabels: {{- include "trioserve.selector" . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* The component whose values apply: "router" or "engine". */}}
{{- define "trioserve.owner" -}}
{{- ternary "router" "engine" (eq (index . 1) "router") -}}
{{- end -}}

{{- define "trioserve.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "trioserve.name" $root }}-{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "trioserve.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ $root.Release.Service }}
  helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end -}}

{{/* Kind and name of the object whose replicas are the routers or engines. */}}
{{- define "trioserve.scaled" -}}
{{- $root := index . 0 -}}
{{- $isGroup := and (eq (index . 1) "engine") (gt (int $root.Values.engine.nodes) 1) -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" $isGroup }}
kind: {{ ternary "LeaderWorkerSet" "Deployment" $isGroup }}
name: {{ include "trioserve.name" $root }}-{{ ternary "engine-group" (index . 1) $isGroup }}
{{- end -}}

{{- define "trioserve.image" -}}
{{- $root := index . 0 -}}
{{- $own := (index $root.Values (include "trioserve.owner" .)).image | default dict -}}
{{ $own.repository | default $root.Values.image.repository }}:{{ $own.tag | default $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end -}}

{{/* The part of a pod's spec that routers and engines share. */}}
{{- define "trioserve.pod" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (include "trioserve.owner" .) -}}
serviceAccountName: {{ include "trioserve.name" $root }}-{{ include "trioserve.owner" . }}
automountServiceAccountToken: {{ eq (index . 1) "router" }}
# Otherwise a Service named trioserve would set TRIOSERVE_PORT, which is an option of the server.
enableServiceLinks: false
{{- if eq (index . 1) "worker" }}
terminationGracePeriodSeconds: 10 # a worker ends at once
{{- else }}
# After the drain, the server needs a few more seconds to stop.
terminationGracePeriodSeconds: {{ add $root.Values.preStopSeconds $root.Values.drainSeconds 10 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  seccompProfile: { type: RuntimeDefault }
  fsGroupChangePolicy: OnRootMismatch
  {{- with $root.Values.user }}
  runAsUser: {{ int . }}
  runAsGroup: {{ int . }}
  fsGroup: {{ int . }}
  {{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {{- include "trioserve.labelSelector" . | nindent 6 }}
{{- range $field := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" }}
{{- with index $own $field }}
{{ $field }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $root.Values.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The part of a container's spec that routers and engines share. */}}
{{- define "trioserve.container" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (include "trioserve.owner" .) -}}
name: {{ index . 1 }}
image: {{ include "trioserve.image" . }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- if eq (index . 1) "worker" }}
# A worker has no HTTP port, so it has no probe. It exits if it cannot continue, and its server notices hung ranks.
{{- else }}
ports:
  - { name: http, containerPort: 8000 }
# The server responds when its model is loaded. Earlier requests wait.
startupProbe:
  httpGet: { path: /health, port: http }
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ divf $own.startSeconds 5 | ceil | int }}
livenessProbe:
  httpGet: { path: /health, port: http }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: { path: /ready, port: http }
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
lifecycle:
  preStop:
    sleep: { seconds: {{ int $root.Values.preStopSeconds }} }
{{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
resources: {{- toYaml $own.resources | nindent 2 }}
{{- end -}}

{{/* A variable from a Secret. Argument: the Secret, its key, the variable, and whether it is optional. */}}
{{- define "trioserve.secretVariable" -}}
- name: {{ index . 2 }}
  valueFrom:
    secretKeyRef: { name: {{ index . 0 }}, key: {{ index . 1 }}, optional: {{ index . 3 }} }
{{- end -}}

{{/* Variables that routers and engines share. */}}
{{- define "trioserve.variables" -}}
{{- $root := index . 0 -}}
{{- if ne (index . 1) "worker" -}}
- { name: TRIOSERVE_HOST, value: 0.0.0.0 }
- { name: TRIOSERVE_PORT, value: "8000" }
{{- end }}
{{- if or (ne (index . 1) "router") (eq $root.Values.router.policy "kv_aware") }}
{{- with $root.Values.engine.hubTokenSecret }}
{{ include "trioserve.secretVariable" (list . "token" "HF_TOKEN" false) }}
{{- end }}
{{- end }}
{{- with (index $root.Values (include "trioserve.owner" .)).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* extraArgs. Flags that the rest of the chart sets or relies on are refused. */}}
{{- define "trioserve.extraArgs" -}}
{{- $component := include "trioserve.owner" . -}}
{{- $ours := splitList " " "host port uds root-path ssl-certfile drain-timeout" -}}
{{- $ours = concat $ours (splitList " " "tensor-parallel-size pipeline-parallel-size nnodes node-rank master-addr headless") -}}
{{- $keys := splitList " " "api-key admin-api-key gateway-api-key endpoint-api-key ranks-key" -}}
{{- range (index (index . 0).Values $component).extraArgs }}
{{- $name := regexFind "^--[a-z-]+" . | trimPrefix "--" }}
{{- if has $name $ours }}
{{- fail (printf "%s.extraArgs: --%s is set by the chart, see values.yaml and docs/guides/kubernetes.md" $component $name) }}
{{- else if has $name $keys }}
{{- fail (printf "%s.extraArgs: --%s belongs in a Secret, see apiKeys and engine.ranksKeySecret" $component $name) }}
{{- end }}
- {{ . | quote }}
{{- end }}
{{- end -}}
