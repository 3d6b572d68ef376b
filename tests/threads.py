"""A thread of its own for a call that must come from another one."""

import threading


def on_thread(function, *args):
    """Call a function on a thread named "other"; return its result, or raise its error here."""
    results, errors = [], []

    def target():
        try:
            results.append(function(*args))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="other")
    thread.start()
    thread.join()
    for error in errors:
        raise error
    return results[0]
