{{/* Names leave room for what stands behind them: 63 characters at most, and 52 of a StatefulSet, of which a
LeaderWorkerSet makes one for each engine. */}}
{{- define "trioserve.name" -}}
{{- $name := ternary .Release.Name (printf "%s-trioserve" .Release.Name) (contains "trioserve" .Release.Name) -}}
{{- $name | trunc (ternary 34 50 (gt (int .Values.engine.nodes) 1)) | trimSuffix "-" -}}
{{- end -}}

{{/* Those below get a list: the root, and "router", "engine", or "worker" for the pods of an engine that do not serve. */}}
{{- define "trioserve.selector" -}}
app.kubernetes.io/name: trioserve
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* The labels of all pods of routers, or of all that engines have, as a selector. */}}
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

{{/* Whose values it has. */}}
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

{{/* What has the number of routers or engines. */}}
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

{{/* Of a pod's spec, what routers and engines have alike. */}}
{{- define "trioserve.pod" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (include "trioserve.owner" .) -}}
serviceAccountName: {{ include "trioserve.name" $root }}-{{ include "trioserve.owner" . }}
automountServiceAccountToken: {{ eq (index . 1) "router" }}
# A Service named trioserve would set TRIOSERVE_PORT, which is an option.
enableServiceLinks: false
{{- if eq (index . 1) "worker" }}
terminationGracePeriodSeconds: 10 # it ends at once
{{- else }}
# What comes behind the drain takes a few seconds.
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

{{/* Of a container, likewise. */}}
{{- define "trioserve.container" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (include "trioserve.owner" .) -}}
name: {{ index . 1 }}
image: {{ include "trioserve.image" . }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- if eq (index . 1) "worker" }}
# It listens nowhere, so nothing can probe it. It ends when it cannot go on, and its server notices ranks that hang.
{{- else }}
ports:
  - { name: http, containerPort: 8000 }
# It answers when its model is loaded; whoever asks before that waits.
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

{{/* A variable from a Secret: the Secret, its key, the variable, and whether it may be missing. */}}
{{- define "trioserve.secretVariable" -}}
- name: {{ index . 2 }}
  valueFrom:
    secretKeyRef: { name: {{ index . 0 }}, key: {{ index . 1 }}, optional: {{ index . 3 }} }
{{- end -}}

{{/* Variables that routers and engines have alike. */}}
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

{{/* extraArgs, unless they say what the rest of the chart relies on. */}}
{{- define "trioserve.extraArgs" -}}
{{- $component := include "trioserve.owner" . -}}
{{- $ours := splitList " " "host port uds root-path ssl-certfile drain-timeout" -}}
{{- $ours = concat $ours (splitList " " "tensor-parallel-size pipeline-parallel-size nnodes node-rank master-addr headless") -}}
{{- $keys := splitList " " "api-key admin-api-key gateway-api-key endpoint-api-key ranks-key" -}}
{{- range (index (index . 0).Values $component).extraArgs }}
{{- $name := regexFind "^--[a-z-]+" . | trimPrefix "--" }}
{{- if has $name $ours }}
{{- fail (printf "%s.extraArgs: --%s is the chart's own, see values.yaml and docs/kubernetes.md" $component $name) }}
{{- else if has $name $keys }}
{{- fail (printf "%s.extraArgs: --%s belongs into a Secret, see apiKeys and engine.ranksKeySecret" $component $name) }}
{{- end }}
- {{ . | quote }}
{{- end }}
{{- end -}}
