package config

import (
	"fmt"
	"strconv"

	"github.com/epcached/epcached/internal/tomlfile"
)

// removedKeys has the fields of earlier versions, with what replaces them; "*" stands for the
// tables around a field, and a table for all its fields. They are accepted with a warning, so that
// the daemon starts after an upgrade.
var removedKeys = map[string]string{
	"space.compress_after": "nothing is compressed any more",
	"standby_seconds":      "a worker now starts with its compile",
	"threshold":            oneSignature,
	"report_quorum":        loadedOnReport,
	"trusted_reporters":    loadedOnReport,
	"*.threshold":          oneSignature, // of a remote

	"quiet_seconds": "changed files are read after 1 s at rest; SIGHUP reads them at once",
	"poll_seconds":  "files that cannot be watched are compared every 2 s",
	"on_expired": "builds of other machines are refused without a trust document; sign one that " +
		"is valid for longer: epcachectl remote revoke --days",
	"worker_socket": "use the flag --worker-socket, as the shipped unit does",
	"remote_socket": "a daemon of the shipped unit uses /run/epcached/remote.sock, and every " +
		"other one starts epcached-remote itself",
	"claims": "a claim has the bounds of [limits], wall and output_bytes, a user 16 claims at a " +
		"time, and [space] user_share of the budget",
	"failures": "a failure is remembered for a minute after a crash, 10 minutes after a limit " +
		"and a day after a refusal; to retry before that, use epcachectl jobs retry, or --refresh",
	"limits.wall_seconds":   "the default is 30m",
	"limits.cpu_seconds":    "each process has 16 times wall",
	"limits.verify_seconds": "a comparison has 2 minutes, and at most wall",
	"limits.output_files":   "a compile may write 1,024 files; use output_bytes",
	"limits.open_files":     "a process may open 4,096 files; use LimitNOFILE= of the unit",
	"limits.processes":      "a worker may have 4,096 processes; use TasksMax= of the unit",
	"limits.stack_bytes":    "a thread has a stack of 64 MiB",
	"limits.nice": "workers have niceness 5, or the daemon's if that is higher: use Nice= of the " +
		"unit",
	"sandbox.namespaces":    "workers have a pid namespace where the machine allows it",
	"*.min_compile_seconds": "all builds are stored; those that compile fastest are evicted first",
	"rebuild.jobs":          "one rebuild runs at a time; use window to choose when",
	"rebuild.cpu_share":     "a rebuild uses half of the time; use window to choose when",
	"space.max_entries":     "use budget, or max_unused",
	"space.user_bytes":      "use user_share, which may be a size",
	"space.unpacked_dir": "unpacked copies are in the state directory; to have none, " +
		"pack = \"off\"",
	"*.connect":      "a connection has 2 s",
	"*.lose_at_most": "a request loses 10 s at most, and a quarter of the compile's estimate",
}

const loadedOnReport = "a report leads to a load of the build; to withhold a build from all " +
	"users without one, use epcachectl invalidate"

const oneSignature = "one signature counts; limit what a key may sign with the lines EPs, " +
	"Builders, Requests and Not-After in its file of trust"

// checkThreshold refuses a table in which several keys had to sign, because a build that only one
// of them signed would be accepted otherwise.
func checkThreshold(table tomlfile.Value) {
	v := table.In("threshold")
	if n, is := v.Raw.(int64); is && n > 1 {
		v.Errorf("%d signatures are not supported any more: %s; then remove this line", n,
			oneSignature)
	}
}

// replaced gives fields that have another name now their values under that name, with a warning.
func replaced(root tomlfile.Value) {
	seconds := root.In("limits", "wall_seconds")
	if n, err := strconv.ParseFloat(fmt.Sprint(seconds.Raw), 64); err == nil && n != 0 {
		seconds.Replace("wall", strconv.FormatFloat(n, 'f', -1, 64)+"s")
	}
	for _, v := range root.In("driver").Elements() {
		if name, is := v.In("module").Raw.(string); is {
			v.In("module").Replace("file", "/sys/module/"+name+"/version")
		}
	}
}
