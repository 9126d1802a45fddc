"""What server and clients say to each other, and how it travels.

It owns the names and the form of messages: `records` (instructions and replies), `schema` (a
method's typed messages), `packing` (many clients in a message of one node), `wire` (half
precision), `stamp` (which method made it) and `identity` (what a node says of itself).
"""
