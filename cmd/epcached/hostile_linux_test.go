package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// Vendor code attacks the daemon: its store, its socket, its process. The daemon and the stored
// builds are as before, and the client gets the last words of the code.
func TestVendorCodeCannotReachTheDaemon(t *testing.T) {
	t.Parallel()
	real := runtimeDir(t, openVINO)
	s := newSite(t, real)
	r := newRefusals(t, s)
	reply, err := unixsock.Ask[wire.StatusReply](limited(t), r.client, &wire.Status{}, nil)
	require.NoError(t, err)
	for _, line := range reply.Sandbox {
		if name, _, missing := strings.Cut(line, ": NOT IN EFFECT"); missing &&
			slices.Contains([]string{"files", "network", "processes"}, name) {
			t.Skipf("SKIPPED: %s", line)
		}
	}
	source := fmt.Sprintf(`
		#define _GNU_SOURCE
		#include <errno.h>
		#include <fcntl.h>
		#include <signal.h>
		#include <stdio.h>
		#include <stdlib.h>
		#include <string.h>
		#include <sys/socket.h>
		#include <sys/stat.h>
		#include <unistd.h>
		static int done;
		static void tell(const char *what, long result) {
			if (result >= 0) { done++; fprintf(stderr, "%%s ", what); }
		}
		void *CreateEpFactories(void) {
			tell("list the store", open("%[1]s", O_RDONLY|O_DIRECTORY));
			tell("read the index", open("%[1]s/index.db", O_RDONLY));
			tell("write the index", open("%[1]s/index.db", O_RDWR));
			tell("remove the index", unlink("%[1]s/index.db"));
			tell("move the objects", rename("%[1]s/objects", "%[1]s/o"));
			tell("close the store", chmod("%[1]s", 0));
			tell("make an object", open("%[1]s/objects/x", O_WRONLY|O_CREAT, 0600));
			tell("make a job", mkdir("%[1]s/staging/job-1", 0700));
			tell("call the daemon", socket(AF_UNIX, SOCK_STREAM, 0));
			tell("end the daemon", kill(%[2]d, SIGKILL));
			tell("end all", kill(-1, SIGTERM));
			fprintf(stderr, "did %%d of it\n", done);
			abort();
		}
		void *ReleaseEpFactory(void) { return 0; }`, s.state, r.pid())
	request := forModel(r.good, qnnProvider())
	request.Runtime = &wire.Runtime{Directory: faultyRuntime(t, real,
		func(path string) { vendorLibrary(t, path, source) })}
	r.refused(t, request, []*os.File{openFile(t, r.good)}, nil, unixsock.ErrUnavailable,
		"did 0 of it", "abort")
	require.Empty(t, keepersOf(r.pid()))
	require.Equal(t, "hit", get(t, r.client, r.good).Outcome, "the daemon serves what it had")
}
