"""A confined process for one program of a model: no network, no files but Python's, no other process, and limits.

By the kernel's own means, without root or a package: resource limits, namespaces, Landlock and seccomp. ``process.py``
starts it, ``confined_program.py`` is what runs in it, ``probe.py`` tries what holds on this machine.
"""
