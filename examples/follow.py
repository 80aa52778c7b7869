#!/usr/bin/env python3
"""Follows the events of ballastd, one a line, and says of each VM in them why it waits; for alerts of one's own.

Usage: follow.py [SOCKET]. Needs the standard library only, and the right to look (root, or the group of the API). It
goes on when an engine dies or is upgraded, and misses none of the last 1,000 events.
"""
import http.client, json, socket, sys, time, urllib.parse

SOCKET = sys.argv[1] if len(sys.argv) > 1 else "/run/ballast/api.sock"
AGAIN_S, SILENT_S = 0.5, 30  # the stream has a line every 10 s

class Ballast(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(SOCKET)

def ask(path, headers={}):
    connection = Ballast("ballast", timeout=SILENT_S)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()

def events(after):
    with ask("/v1/events/stream", {"Last-Event-ID": str(after)}) as stream:
        for line in stream:
            if line.startswith(b"data:"):
                yield json.loads(line[5:])

def why(vm):
    with ask("/v1/vms/" + urllib.parse.quote(vm, safe="")) as answer:  # 404: it has ended
        return json.load(answer)["why"] if answer.status == 200 else None

last = 0
while True:
    try:
        for event in events(last):
            last = event["id"]
            print(event["kind"], event["message"], sep=": ", flush=True)
            if event["vm"] and (reason := why(event["vm"])):
                print(f"  {event['vm']}: {reason}", flush=True)
    except (OSError, http.client.HTTPException, json.JSONDecodeError):
        time.sleep(AGAIN_S)  # another engine comes
