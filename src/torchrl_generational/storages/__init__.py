"""Where records live, and the writers that say where the next one goes.

Promises that whatever puts a new record into a slot advances its stamp before the data, and that processes share what
they should. Knows records and stamps, and neither samplers nor buffers.
"""
