"""A Hub in memory, on loopback, for the real client: what `huggingface_hub` asks of models and datasets, and no more.

with HubServer() as hub:
    subprocess.run(command, env={**os.environ, **hub.environment(tmp_path / "cache")})
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# Longer files go through LFS, like on the Hub, where the limit depends on more than the size.
LFS_SIZE = 1_000_000
WRITE, READ, STRANGER = "hf_writes_and_reads", "hf_only_reads", "hf_somebody_else"
TOKENS = {WRITE: ("ada", "write"), READ: ("ada", "read"), STRANGER: ("eve", "write")}


class HubError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass
class Repo:
    """A repository: branches of commits, each a whole tree of files."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, list[str]] = field(default_factory=lambda: {"main": []})
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{id(self)} {branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch].append(oid)
        self.messages.append(message)
        return oid

    def resolve(self, revision: str) -> str:
        if revision in self.branches:
            return self.branches[revision][-1]
        if revision in self.commits:
            return revision
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.resolve(revision)]


def oid_of(content: bytes) -> str:
    """The sha256 of an LFS file, the git blob's sha1 of any other: what the client compares to skip a file."""
    if len(content) >= LFS_SIZE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(path: str, content: bytes) -> dict[str, Any]:
    lfs = {"oid": oid_of(content), "size": len(content), "pointerSize": 130}
    blob = {"type": "file", "path": path, "size": len(content), "oid": oid_of(content)}
    return {**blob, "lfs": lfs} if len(content) >= LFS_SIZE else blob


class HubServer(ThreadingHTTPServer):
    """Serve while the context is open.

    `repos[type, id]` are the repositories, type being models or datasets. `received` is everything that was sent but
    the Authorization header. `faults[operation]` is an iterator over what goes wrong with it next: a status, "drop"
    or None for nothing; operations are commit, lfs and create.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[tuple[str, str], Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.received: list[bytes] = []
        self.faults: dict[str, Iterator[int | str | None]] = {}

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()

    # A client that goes away is no error of the server's.
    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    def environment(self, home: Path, token: str | None = WRITE) -> dict[str, str]:
        """The variables of a process that takes this for the Hub; to be set before it imports `huggingface_hub`."""
        names = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        return {**names, "HF_TOKEN": token or "", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def add(self, kind: str, name: str, folder: Path | None = None, private: bool = False) -> Repo:
        """Make a repository that holds a folder's files."""
        repo = self.repos[kind, name] = Repo(private)
        if folder is not None:
            paths = [path for path in folder.rglob("*") if path.is_file()]
            files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
            repo.commit("main", {**repo.files(), **files}, "upload")
        return repo


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self._chunks() if self.headers.get("Transfer-Encoding") == "chunked" else self.rfile.read(length)
        headers = [f"{name}: {value}" for name, value in self.headers.items() if name.lower() != "authorization"]
        self.server.received.append("\n".join([self.requestline, *headers, ""]).encode() + self.body)
        self.user, self.role = TOKENS.get(
            (self.headers.get("Authorization") or "").removeprefix("Bearer "), (None, "")
        )
        path = unquote(urlsplit(self.path).path)
        self.query = parse_qs(urlsplit(self.path).query)
        try:
            for method, pattern, action in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in method:
                    answer = action(self, **match.groupdict())
                    break
            else:
                raise HubError(404, f"no such page: {self.command} {path}")
        except HubError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message}
            answer = error.status, json.dumps({"error": error.message}).encode(), headers
        except ConnectionError:
            self.close_connection = True
            return
        self._answer(*(answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode(), {})))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, body: bytes, headers: dict[str, str | None]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self) -> Any:
        return json.loads(self.body)

    def _maybe_fail(self, operation: str) -> None:
        fault = next(self.server.faults.get(operation, iter(())), None)
        if fault == "drop":
            raise ConnectionAbortedError
        if fault is not None:
            raise HubError(int(fault), f"This {operation} was made to fail.")

    def _repo(self, kind: str | None, name: str, write: bool = False) -> Repo:
        repo = self.server.repos.get(((kind or "models").strip("/"), name))
        if repo is None or (repo.private and self.user not in (None, name.split("/")[0])):
            raise HubError(404, "Repository not found", "RepoNotFound")
        if repo.private and self.user is None:
            raise HubError(401, "Invalid username or password.", "RepoNotFound")
        if write and (self.role != "write" or self.user != name.split("/")[0]):
            raise HubError(403, "You don't have the rights to write to this repository.")
        return repo

    def whoami(self) -> Any:
        if self.user is None:
            raise HubError(401, "Invalid user token.")
        token = {"displayName": "test", "role": self.role}
        auth = {"type": "access_token", "accessToken": token}
        return {"type": "user", "id": "1", "name": self.user, "fullname": self.user, "orgs": [], "auth": auth}

    def create(self) -> Any:
        self._maybe_fail("create")
        asked = self._json()
        kind, owner = f"{asked.get('type') or 'model'}s", asked.get("organization") or self.user
        name = f"{owner}/{asked['name']}"
        url = f"{self.server.url}/{'' if kind == 'models' else kind + '/'}{name}"
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        if self.role != "write" or owner != self.user:
            raise HubError(403, f"You don't have the rights to create a {kind[:-1]} under the namespace {owner}.")
        if any(existing == name for _, existing in self.server.repos):
            body = json.dumps({"error": f"You already created this {kind[:-1]} repo", "url": url}).encode()
            return 409, body, {"X-Error-Message": "You already created this repo"}
        self.server.add(kind, name, private=asked.get("visibility") == "private" or bool(asked.get("private")))
        return {"url": url, "name": name}

    def delete(self) -> Any:
        asked = self._json()
        kind, name = f"{asked.get('type') or 'model'}s", f"{asked.get('organization') or self.user}/{asked['name']}"
        self._repo(kind, name, write=True)
        del self.server.repos[kind, name]
        return {}

    def validate_yaml(self) -> Any:
        return {"errors": [], "warnings": []}

    def info(self, kind: str, name: str, revision: str = "main") -> Any:
        repo = self._repo(kind, name)
        siblings = [{"rfilename": path} for path in repo.files(revision)]
        known = {"id": name, "private": repo.private, "sha": repo.resolve(revision), "siblings": siblings}
        return {**known, "tags": [], "downloads": 0, "likes": 0, "lastModified": "2026-01-01T00:00:00.000Z"}

    def tree(self, kind: str, name: str, revision: str, path: str | None) -> Any:
        files = self._repo(kind, name).files(revision)
        prefix = f"{path.strip('/')}/" if path and path.strip("/") else ""
        inside = {file: content for file, content in files.items() if file.startswith(prefix)}
        if prefix and not inside:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
        if self.query.get("recursive", ["false"])[0].lower() != "true":
            folders = {
                prefix + file.removeprefix(prefix).split("/")[0] for file in inside if "/" in file[len(prefix) :]
            }
            inside = {file: content for file, content in inside.items() if "/" not in file[len(prefix) :]}
        else:
            folders = {file.rpartition("/")[0] for file in inside if "/" in file}
        trees = [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in sorted(folders)]
        return trees + [entry(file, content) for file, content in sorted(inside.items())]

    def paths_info(self, kind: str, name: str, revision: str) -> Any:
        files = self._repo(kind, name).files(revision)
        asked = self._json()["paths"] if self.body.startswith(b"{") else parse_qs(self.body.decode())["paths"]
        found = [entry(path, files[path]) for path in asked if path in files]
        folders = [path for path in asked if any(file.startswith(f"{path}/") for file in files)]
        return found + [{"type": "directory", "path": folder, "oid": "0" * 40, "size": 0} for folder in folders]

    def commits(self, kind: str, name: str, revision: str) -> Any:
        repo = self._repo(kind, name)
        repo.resolve(revision)
        date = "2026-01-01T00:00:00.000Z"
        return [
            {"id": oid, "title": "", "message": "", "date": date, "authors": []} for oid in repo.branches[revision]
        ]

    def auth_check(self, kind: str, name: str, write: str | None) -> Any:
        self._repo(kind, name, write=bool(write))
        return {}

    def settings(self, kind: str, name: str) -> Any:
        self._repo(kind, name, write=True).private = self._json().get("visibility") == "private"
        return {}

    def branch(self, kind: str, name: str, branch: str) -> Any:
        repo = self._repo(kind, name, write=True)
        if branch in repo.branches:
            raise HubError(409, f"Reference already exists: {branch}")
        repo.branches[branch] = [repo.resolve("main")]
        return {}

    def preupload(self, kind: str, name: str, revision: str) -> Any:
        files = self._repo(kind, name, write=True).files(revision)
        answers = []
        for file in self._json()["files"]:
            mode = "lfs" if file["size"] >= LFS_SIZE else "regular"
            oid = oid_of(files[file["path"]]) if file["path"] in files else None
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def batch(self, kind: str | None, name: str) -> Any:
        self._repo(kind, name, write=True)
        answers = []
        for asked in self._json()["objects"]:
            href = f"{self.server.url}/lfs/{asked['oid']}"
            missing = {"actions": {"upload": {"href": href}}} if asked["oid"] not in self.server.objects else {}
            answers.append({"oid": asked["oid"], "size": asked["size"], **missing})
        return {"transfer": "basic", "objects": answers}

    def lfs(self, oid: str) -> Any:
        self._maybe_fail("lfs")
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, "The content is not what its name says.")
        self.server.objects[oid] = self.body
        return {}

    def commit(self, kind: str, name: str, revision: str) -> Any:
        repo = self._repo(kind, name, write=True)
        self._maybe_fail("commit")
        parent = repo.resolve(revision)
        files, message = dict(repo.commits[parent]), ""
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit") not in (None, parent):
                    raise HubError(412, "A commit has happened since. Please refresh and try again.")
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        oid = repo.commit(revision, files, message)
        return {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid, "success": True}

    def resolve(self, kind: str | None, name: str, revision: str, path: str) -> Any:
        repo = self._repo(kind, name)
        oid = repo.resolve(revision)
        if path not in repo.commits[oid]:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
        content = repo.commits[oid][path]
        headers = {"X-Repo-Commit": oid, "ETag": f'"{oid_of(content)}"', "Accept-Ranges": "bytes"}
        headers["Content-Type"] = "application/octet-stream"
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked is None:
            return 200, content, headers
        start, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        return 206, content[start : end + 1], headers


_API = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"
_GIT = r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)"
_AT = r"/(?P<revision>[^/]+)"
ROUTES: list[tuple[str, str, Any]] = [
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create),
    ("DELETE", "/api/repos/delete", Handler.delete),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("GET", _API, Handler.info),
    ("GET", f"{_API}/revision{_AT}", Handler.info),
    ("GET", f"{_API}/tree{_AT}(?P<path>/.*)?", Handler.tree),
    ("GET", f"{_API}/commits{_AT}", Handler.commits),
    ("GET", f"{_API}/auth-check(?P<write>/write)?", Handler.auth_check),
    ("PUT", f"{_API}/settings", Handler.settings),
    ("POST", f"{_API}/branch/(?P<branch>[^/]+)", Handler.branch),
    ("POST", f"{_API}/paths-info{_AT}", Handler.paths_info),
    ("POST", f"{_API}/preupload{_AT}", Handler.preupload),
    ("POST", f"{_API}/commit{_AT}", Handler.commit),
    ("POST", rf"{_GIT}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]{64})", Handler.lfs),
    ("GET HEAD", f"{_GIT}/resolve{_AT}/(?P<path>.+)", Handler.resolve),
]
