"""This host, without SGLang: its cores, files, ports and processes, what serves, how it is described."""
