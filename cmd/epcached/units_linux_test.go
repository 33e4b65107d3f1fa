package main

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/epcached/epcached/unixsock"
	"github.com/epcached/epcached/unixsock/wire"
)

// underManager runs systemd's manager of user units in namespaces of its own, with the socket
// started. It writes how often the service was restarted until there is a file "end".
const underManager = `
mount -t cgroup2 none /sys/fs/cgroup && mount -t tmpfs none /run || exit 77
mkdir -p /run/systemd/system /run/user; mkdir -m 700 /run/user/0
export XDG_RUNTIME_DIR=/run/user/0 XDG_CONFIG_HOME=$HOME/config
/lib/systemd/systemd --user --log-target=null & manager=$!
while [ ! -S /run/user/0/systemd/private ]; do kill -0 $manager || exit 77; sleep 0.05; done
systemctl --user start epcached.socket || exit 1
while [ ! -e $HOME/end ]; do
	systemctl --user show -P NRestarts epcached.service > $HOME/new && mv $HOME/new $HOME/restarts
	sleep 0.1
done
systemctl --user is-active epcached.socket epcached.service
systemctl --user show -P KillMode epcached.service
`

// ofTheSystem are the fields that a user's manager, without privileges, cannot apply.
var ofTheSystem = regexp.MustCompile(
	`(?m)^(User|Group|StateDirectory\w*|Protect\w+|Private\w+|Restrict\w+|LockPersonality|` +
		`CapabilityBoundingSet|NoNewPrivileges|SystemCall\w+|MemoryDenyWriteExecute|` +
		`IPAddressDeny|RemoveIPC|LimitNOFILE)=.*\n`)

// installUnits installs the shipped units for a user with a directory as the home, with a shorter
// wait.
func installUnits(t *testing.T, home string) {
	t.Helper()
	units := filepath.Join(home, "config", "systemd", "user")
	require.NoError(t, os.MkdirAll(units, 0o755))
	start := "ExecStart=" + filepath.Join(programs, "epcached") + " --config " + home +
		"/epcached.toml --state " + home + "/state"
	for _, name := range []string{"epcached.service", "epcached.socket"} {
		shipped, err := os.ReadFile(filepath.Join("..", "..", "systemd", name))
		require.NoError(t, err)
		text := ofTheSystem.ReplaceAllString(string(shipped), "")
		// workers are children of a user's own daemon
		text = strings.ReplaceAll(text, " epcached-worker.socket", "")
		text = regexp.MustCompile(`(?m)^ExecStart=.*`).ReplaceAllLiteralString(text, start)
		text = regexp.MustCompile(`(?m)^ListenStream=.*`).
			ReplaceAllLiteralString(text, "ListenStream="+home+"/s")
		text = regexp.MustCompile(`(?m)^RestartSec=.*`).
			ReplaceAllLiteralString(text, "RestartSec=200ms")
		require.NoError(t, os.WriteFile(filepath.Join(units, name), []byte(text), 0o644))
	}
}

// A mistake in the configuration ends neither the service nor its socket for good.
func TestUnitsSurviveAMistakeInTheConfiguration(t *testing.T) {
	home := shortDir(t)
	installUnits(t, home)
	config := filepath.Join(home, "epcached.toml")
	require.NoError(t, os.WriteFile(config, []byte("nonsense = 1\n"), 0o644))

	var out bytes.Buffer
	manager := exec.Command("unshare", "--map-root-user", "--mount", "--cgroup", "--pid", "--fork",
		"--mount-proc", "sh", "-c", underManager)
	manager.Env = append(os.Environ(), "HOME="+home)
	manager.Stdout, manager.Stderr = &out, &out
	require.NoError(t, manager.Start())
	done := make(chan error, 1)
	go func() { done <- manager.Wait() }()
	ended := false
	end := func() {
		if !ended {
			ended = true
			require.NoError(t, os.WriteFile(filepath.Join(home, "end"), nil, 0o644))
			require.NoError(t, <-done, out.String())
		}
	}
	defer end()
	var pending net.Conn
	require.Eventually(t, func() bool {
		select {
		case <-done:
			ended = true
			t.Skipf("NOT TESTED: no manager of systemd runs here: %s", out.String())
		default:
		}
		var err error
		pending, err = net.Dial("unix", filepath.Join(home, "s"))
		return err == nil
	}, patience, pollEvery, "systemd makes the socket")
	defer pending.Close()
	const limit = 5 // systemd's own, in ten seconds
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(filepath.Join(home, "restarts"))
		restarts, err2 := strconv.Atoi(strings.TrimSpace(string(text)))
		return err == nil && err2 == nil && restarts > limit
	}, 20*time.Second, pollEvery, "it is tried again and again")

	require.NoError(t, os.WriteFile(config, nil, 0o644))
	c, err := unixsock.Dial(limited(t), filepath.Join(home, "s"))
	require.NoError(t, err)
	defer c.Close()
	reply, err := unixsock.Ask[wire.StatusReply](limited(t), c, &wire.Status{}, nil)
	require.NoError(t, err)
	require.Equal(t, "socket", reply.GetStartedBy())
	require.Equal(t, filepath.Join(home, "s"), reply.GetSocket())
	end()
	require.Equal(t, "active\nactive\nmixed\n", out.String())
}
