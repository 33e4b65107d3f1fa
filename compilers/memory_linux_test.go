package compilers

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The limits and kills of a cgroup are found in both versions, and in containers, where the list
// has paths of the host.
func TestMemoryOfCgroups(t *testing.T) {
	for name, c := range map[string]struct {
		list         string
		files        map[string]string
		limit, kills int64
	}{
		"none": {list: "", limit: 1 << 40},
		"version 2": {"0::/a/b\n", map[string]string{"a/b/memory.max": "max\n",
			"a/b/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 9\n",
			"a/memory.max":      "4096\n", "a/memory.events": "oom_kill 7\n"}, 4096, 2},
		"version 2, container": {"0::/host/path\n", map[string]string{"memory.max": "8192\n",
			"memory.events": "oom_kill 1\n"}, 8192, 1},
		"version 2, outside": {"0::/../other\n", map[string]string{"memory.max": "8192\n"},
			8192, 0},
		"version 1": {"5:cpu:/x\n4:hugetlb,memory:/a\n1:name=systemd:/\n", map[string]string{
			"memory/a/memory.limit_in_bytes": "1024\n",
			"memory/a/memory.oom_control":    "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
			"memory/memory.limit_in_bytes":   "9223372036854771712\n"}, 1024, 5},
		"version 1, container": {"4:memory:/docker/ab\n0::/\n", map[string]string{
			"memory/memory.limit_in_bytes": "2048\n",
			"memory/memory.oom_control":    "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"},
			2048, 1},
		"malformed": {"x\n0::\n", map[string]string{"memory.max": "-4\n"}, 1 << 40, 0},
	} {
		dir := t.TempDir()
		g := cgroups{filepath.Join(dir, "list"), filepath.Join(dir, "fs")}
		require.NoError(t, os.WriteFile(g.list, []byte(c.list), 0o600))
		for file, text := range c.files {
			path := filepath.Join(g.root, file)
			require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
			require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		}
		require.Equal(t, c.limit, g.limit(1<<40), name)
		require.Equal(t, c.kills, g.kills(), name)
	}
	require.Equal(t, int64(5), cgroups{"/nonexistent", "/nonexistent"}.limit(5))
}
