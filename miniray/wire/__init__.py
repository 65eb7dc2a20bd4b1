"""Sockets between processes of one machine, and the loop that reads and writes them.

What the rest of the runtime uses of this package:

- ``IOLoop`` (``io_loop.py``) serves all sockets and timers of a driver or a worker.
- ``Gate`` (``io_loop.py``) is what a thread waits at until a message has come.
- ``NodeLink`` (``node_link.py``) and ``PeerTable`` (``peers.py``) send messages: to the daemon of
  this node, and to other processes, over a socket of their own or through the daemon.
  Both stand on ``Connection`` (``connection.py``, ``sockets.py``).
- ``uncut`` and ``Interrupts.begin`` (``interrupts.py``) hold signals back.

Why a waiting thread reads the sockets
--------------------------------------
A caller that waits for a reply could sleep until the I/O thread has read it. Every call would then
cost two switches between threads of one process, each with a turn of the interpreter's lock: half
of the time of a call. So the sockets are in an epoll of their own, which one thread at a time
watches:

1. The I/O thread does, as long as no thread waits. It also runs timers.
2. A thread that waits in ``Gate.wait`` takes over (``IOLoop.serve``): it stops the I/O thread's
   watch (one system call, which wakes no thread), reads and handles messages itself until its
   gate is open, and gives the sockets back. A second thread that waits meanwhile just sleeps.
3. The event loop of an asyncio actor does as in 2 for as long as it waits
   (``worker/actor_modes.py``).

Callbacks run one at a time (``IOLoop._turn``), whichever thread it is. They must not block, and
never run user code; that user code may run *between* any two of their instructions, in a
``__del__`` that the garbage collector calls, is why their locks are reentrant. A thread that waits
for a short time looks again and again instead of sleeping (``Pace``, ``poller.py``).

What follows for signals
------------------------
Python runs the handlers of signals in the main thread, between any two instructions, and many of
them raise: Ctrl-C, a cancelled task, a time limit of the user's. When the main thread handles
messages, a handler that raises in the middle would lose half of what a message does. Hence these
rules:

- Whatever the main thread does between two consistent states is a *step*: ``@uncut``, or
  ``Interrupts.begin`` ... ``end``. A signal that comes in a step is remembered, and its handler
  runs when the step is over. Making a call is a step; so are sending a message, freeing a value,
  and handling a message (the step of ``IOLoop.serve``).
- A wait is where handlers do run within a step (``Interrupts.release``): the state is consistent
  there, and Ctrl-C must end it. What raises there leaves ``Gate.wait``; the caller has to undo
  what it requested (``undo`` of ``NodeLink.node_request``).
- A handler may itself make calls and wait: the wait that it interrupts goes on after it
  (``IOLoop.serve`` within ``serve``).
- What Python calls by itself, a ``__del__`` or the callback of a weak reference, swallows
  exceptions, those of signals' handlers too. ``objects/ignored_signals.py`` and
  ``Interruption.was_ignored`` (``worker/executor.py``) raise those again later.
- Threads other than the main one run no handlers: none of this costs them anything.
"""
