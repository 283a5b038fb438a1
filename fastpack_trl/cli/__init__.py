"""Commands of ``fastpack-trl``, alone on top: nothing imports them."""
