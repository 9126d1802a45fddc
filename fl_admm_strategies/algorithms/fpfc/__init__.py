"""FPFC: the method, how it finds its penalty, its asynchronous form, and new clients."""
