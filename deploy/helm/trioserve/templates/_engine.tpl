{{/* Refuse values that the server would refuse at its start, or with which it would wait forever. */}}
{{- define "trioserve.checkRanks" -}}
{{- $engine := .Values.engine -}}
{{- $nodes := int $engine.nodes -}}
{{- $stages := int $engine.pipelineParallelSize -}}
{{- $ranks := mul $engine.tensorParallelSize $stages -}}
{{- if mod $ranks $nodes -}}
{{- fail (printf "engine.tensorParallelSize is %v, but engine.nodes is %d: give each node the same number of ranks, such as %d in all" $engine.tensorParallelSize $nodes $nodes) -}}
{{- else if and (gt $stages 1) (mod $stages $nodes) -}}
{{- fail (printf "engine.pipelineParallelSize is %d, but engine.nodes is %d: give each node the same number of stages, such as %d in all" $stages $nodes $nodes) -}}
{{- end -}}
{{- range $name, $count := $engine.resources.limits -}}
{{- if and (gt $ranks 1) (hasSuffix "/gpu" $name) (lt (int64 $count) (div $ranks $nodes)) -}}
{{- fail (printf "engine.resources.limits: %s is %v, but a pod has %d ranks, and each needs one" $name $count (div $ranks $nodes)) -}}
{{- end -}}
{{- end -}}
{{- if gt $nodes 1 -}}
{{- if not $engine.ranksKeySecret -}}
{{- fail (printf "engine.nodes is %d: name a Secret with \"ranks-key\" in engine.ranksKeySecret" $nodes) -}}
{{- end -}}
{{- if and $engine.cache.claim.create (not (has "ReadWriteMany" $engine.cache.claim.accessModes)) -}}
{{- fail (printf "engine.cache.claim.accessModes: the pods of an engine on %d nodes need ReadWriteMany" $nodes) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A pod of an engine. Argument: a list of the root, and "engine" for the serving pod or "worker" for others. */}}
{{- define "trioserve.enginePod" -}}
{{- $root := index . 0 -}}
{{- $engine := $root.Values.engine -}}
{{- $serves := eq (index . 1) "engine" -}}
{{- $isSpread := gt (int $engine.nodes) 1 -}}
{{- $hasRanks := gt (mul $engine.tensorParallelSize $engine.pipelineParallelSize) 1 -}}
metadata:
  labels: {{- include "trioserve.selector" . | nindent 4 }}
  {{- with $engine.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "trioserve.pod" . | nindent 2 }}
  containers:
    - {{ include "trioserve.container" . | nindent 6 | trim }}
      args:
        - serve
        - {{ printf "--model=%s" $engine.model | quote }}
        {{- if $hasRanks }}
        - --tensor-parallel-size={{ int $engine.tensorParallelSize }}
        - --pipeline-parallel-size={{ int $engine.pipelineParallelSize }}
        {{- end }}
        {{- if $isSpread }}
        - --nnodes={{ int $engine.nodes }}
        - --node-rank={{ ternary "0" "$(LWS_WORKER_INDEX)" $serves }}
        # This name is in the leader's own /etc/hosts, so the leader can resolve it without DNS.
        - --master-addr=$(LWS_LEADER_ADDRESS).svc.{{ $root.Values.clusterDomain }}
        {{- end }}
        {{- if $serves }}
        {{- with $engine.servedModelName }}
        - {{ printf "--served-model-name=%s" . | quote }}
        {{- end }}
        {{- if eq $root.Values.router.policy "kv_aware" }}
        - --kv-events
        {{- end }}
        - --drain-timeout={{ $root.Values.drainSeconds }}
        {{- else }}
        - --headless
        {{- end }}
        {{- with include "trioserve.extraArgs" . | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      env:
        {{- if $serves }}
        # Without this variable, the server would use all cores of the node. The server also passes it to ranks on other nodes.
        - name: TRIOSERVE_THREADS
          valueFrom:
            resourceFieldRef: { containerName: engine, resource: requests.cpu, divisor: "1" }
        {{- with $root.Values.apiKeys.existingSecret }}
        # The routers' key is an admin key, because routers name the client that a request is for.
        {{- include "trioserve.secretVariable" (list . "engine-api-key" "TRIOSERVE_API_KEY" false) | nindent 8 }}
        {{- include "trioserve.secretVariable" (list . "engine-api-key" "TRIOSERVE_ADMIN_API_KEY" false) | nindent 8 }}
        {{- end }}
        {{- end }}
        {{- if $isSpread }}
        {{- include "trioserve.secretVariable" (list $engine.ranksKeySecret "ranks-key" "TRIOSERVE_RANKS_KEY" false) | nindent 8 }}
        {{- end }}
        {{- with include "trioserve.variables" . | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      volumeMounts:
        - { name: cache, mountPath: /var/cache/trioserve }
        - { name: tmp, mountPath: /tmp }
        {{- if $hasRanks }}
        - { name: shared-memory, mountPath: /dev/shm }
        {{- end }}
        {{- with $engine.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: cache
      {{- if or $engine.cache.existingClaim $engine.cache.claim.create }}
      persistentVolumeClaim:
        claimName: {{ $engine.cache.existingClaim | default (printf "%s-cache" (include "trioserve.name" $root)) }}
      {{- else }}
      emptyDir: { sizeLimit: {{ $engine.cache.sizeLimit }} }
      {{- end }}
    - name: tmp
      emptyDir: { sizeLimit: 1Gi }
    {{- if $hasRanks }}
    - name: shared-memory
      emptyDir: { medium: Memory, sizeLimit: {{ $engine.sharedMemory }} }
    {{- end }}
    {{- with $engine.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
