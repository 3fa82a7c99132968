"""Redis users of the pipeline's parts: each may do what its part does, and nothing else.

Keys are named in our Lua scripts, not declared, so Redis checks every key a script touches against
the user that runs it. Nobody but the administrator may flush, configure, save, or read all keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class AclUser(StrEnum):
    """Who connects."""

    GATEWAY = "gateway"
    WORKER = "worker"
    FLOWER = "flower"


# pipeline/ledger/keys.py and pipeline/ledger/lua/common.lua.
_LEDGER_KEYS = (
    "request:*", "tokens:*", "prompt_logprobs:*", "waiting:*", "released:*", "line:*", "lines:*",
    "jobs:*", "webhooks",
    "finish:*", "virtual:*", "turns:*", "running:*", "lease:*", "cancels:*", "frontier:*", "open:*",
    "crash:*", "node:*", "slots", "workers", "queues", "deadlines", "leader", "dead_letters", "counters",
    # By model; the bare names are those of the time when there was one.
    "held*", "num_held*", "ahead*", "owed_tokens*", "pace_ms*", "trials*", "on_trial*", "asked_lately*",
    "faults", "batch_runner", "resting", "drains", "links",
)  # fmt: skip
# Lists of messages, by model and one per priority; kombu's table of queues.
_QUEUE_KEYS = ("prefill*", "decode.*", "_kombu.*")
_UPKEEP_KEYS = ("unacked.*", "unacked_index.*", "unacked_mutex.*")  # struck off with a lost worker
_LEDGER_CHANNELS = ("gateway:*", "control:*")
# Of database 0. A pattern that is subscribed to must stand here word for word, so no `/*.celery...`.
_CELERY_CHANNELS = ("/0.celeryev", "/0.celeryev/*", "/0.celery.pidbox", "/0.celery.pidbox/*")

_CONNECTION = (
    "ping", "hello", "auth", "select", "client|setname", "client|setinfo", "client|id", "info",
    "time", "multi", "exec", "discard", "watch", "unwatch",
)  # fmt: skip
_LEDGER_COMMANDS = (
    "evalsha", "script|load", "script|exists", "get", "set", "strlen", "append", "getrange",
    "incrby", "exists", "del", "expire", "pexpire", "ttl", "pttl", "hset", "hsetnx", "hget",
    "hmget", "hgetall", "hdel", "hincrby", "hexists", "hlen", "sadd", "srem", "spop", "smembers",
    "scard", "zadd", "zrem", "zscore", "zcard", "zrange", "zrangebyscore", "zremrangebyscore",
    "zremrangebyrank", "zrank", "zrevrank",
    "lpush", "rpush", "lpop", "llen", "ltrim", "lrange", "lrem", "publish", "subscribe",
    "unsubscribe",
)  # fmt: skip
_CONSUMER_COMMANDS = (
    "brpop", "rpop", "psubscribe", "punsubscribe", "zrevrangebyscore", "sismember", "setex",
)  # fmt: skip
_RATE_LIMIT_COMMANDS = ("incr", "mget")


@dataclass(frozen=True, slots=True)
class Rights:
    """Patterns of keys and channels, and commands, of one user."""

    keys: tuple[str, ...]
    channels: tuple[str, ...]
    commands: tuple[str, ...]


RIGHTS: Mapping[AclUser, Rights] = {
    AclUser.GATEWAY: Rights(
        keys=(*_LEDGER_KEYS, *_QUEUE_KEYS, *_UPKEEP_KEYS, "LIMITS:*"),
        # No channel of Celery's remote control: whoever may publish there can stop every worker.
        channels=_LEDGER_CHANNELS,
        commands=(*_CONNECTION, *_LEDGER_COMMANDS, *_RATE_LIMIT_COMMANDS),
    ),
    AclUser.WORKER: Rights(
        keys=(*_LEDGER_KEYS, *_QUEUE_KEYS, *_UPKEEP_KEYS, "unacked", "unacked_index",
              "unacked_mutex", "*.celery.pidbox", "*.celery.pidbox\x06\x16*"),
        channels=(*_LEDGER_CHANNELS, *_CELERY_CHANNELS),
        commands=(*_CONNECTION, *_LEDGER_COMMANDS, *_CONSUMER_COMMANDS),
    ),
    # It sees events and asks workers what they do; it has no key of the ledger, so no prompt.
    AclUser.FLOWER: Rights(
        keys=("_kombu.*", "*.celery.pidbox", "*.celery.pidbox\x06\x16*", "celeryev.*",
              "unacked", "unacked_index", "unacked_mutex", "%R~prefill*", "%R~decode.*",
              "%R~celery", "%R~celery\x06\x16*"),
        channels=_CELERY_CHANNELS,
        commands=(*_CONNECTION, *_CONSUMER_COMMANDS, "publish", "subscribe", "unsubscribe", "sadd",
                  "srem", "smembers", "exists", "del", "expire", "llen", "lpush", "rpush", "lpop",
                  "hset", "hdel", "hget", "zadd", "zrem", "get", "set", "evalsha", "script|load",
                  "script|exists", "pexpire", "zrange",
                  "hgetall", "hmget", "zscore", "zcard", "zrangebyscore", "ttl", "pttl"),
    ),
}  # fmt: skip


def acl_rules(user: AclUser, password: str) -> list[str]:
    """The words after `ACL SETUSER`; the password as its SHA-256."""
    rights = RIGHTS[user]
    digest = hashlib.sha256(password.encode()).hexdigest()
    keys = [key if key.startswith("%") else f"~{key}" for key in rights.keys]
    return [
        user.value, "reset", "on", f"#{digest}", *keys,
        *(f"&{channel}" for channel in rights.channels), "-@all",
        *(f"+{command}" for command in rights.commands),
    ]  # fmt: skip


def setuser_line(user: AclUser, password: str) -> str:
    """A line for redis-cli, with the separator bytes of kombu's list names spelled out."""
    words = []
    for rule in acl_rules(user, password):
        spelled = rule.replace("\x06", "\\x06").replace("\x16", "\\x16")
        words.append(f'"{spelled}"' if spelled != rule else rule)
    return "ACL SETUSER " + " ".join(words)


def acl_file(passwords: Mapping[AclUser, str], admin_password: str) -> str:
    """A file for `redis-server --aclfile`; `default` is the administrator.

    Such a file takes no quotes; the separator bytes stand in it as they are.
    """
    digest = hashlib.sha256(admin_password.encode()).hexdigest()
    lines = [f"user default on #{digest} ~* &* +@all"]
    for user, password in passwords.items():
        name, _, *rules = acl_rules(user, password)
        lines.append(" ".join(["user", name, *rules]))
    return "\n".join(lines) + "\n"
