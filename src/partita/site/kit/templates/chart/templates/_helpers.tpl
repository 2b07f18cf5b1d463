{{- define "partita.labels" -}}
app.kubernetes.io/name: partita
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "partita.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: ["ALL"]
{{- end }}

{{- define "partita.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.uid }}
  runAsGroup: {{ .Values.uid }}
  fsGroup: {{ .Values.uid }}
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "partita.data.mounts" -}}
{{- range $index, $each := .Values.data }}
- {name: data-{{ $index }}, mountPath: {{ $each.path | quote }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "partita.data.volumes" -}}
{{- range $index, $each := .Values.data }}
- name: data-{{ $index }}
  persistentVolumeClaim: {claimName: {{ $each.claim | quote }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "partita.network" -}}
{{- if contains "/" . }}{{ . }}{{ else if contains ":" . }}{{ . }}/128{{ else }}{{ . }}/32{{ end }}
{{- end }}

{{- define "partita.environment" -}}
{{- range $key, $value := .Values.environment }}
- {name: {{ $key }}, value: {{ $value | quote }}}
{{- end }}
- {name: HOME, value: /tmp}
{{- end }}
