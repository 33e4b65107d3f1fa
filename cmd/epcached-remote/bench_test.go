package main

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
	"github.com/stretchr/testify/require"
	"lukechampine.com/blake3"

	"github.com/epcached/epcached/remote"
)

// BenchmarkPull fetches a build of 91 MB of random bytes from a real S3 server into synced files,
// and verifies them, next to programs that copy the same bytes. make bench-remote fetches these.
func BenchmarkPull(b *testing.B) {
	deps, err := filepath.Abs("../../.deps/remote")
	require.NoError(b, err)
	server := filepath.Join(deps, "versitygw")
	if _, err := os.Stat(server); err != nil {
		b.Skip("NOT MEASURED: make deps-remote fetches the server")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(b, err)
	address := l.Addr().String()
	require.NoError(b, l.Close())
	cmd := exec.Command(server, "--access", "user", "--secret", "secret-secret", "--port", address,
		"posix", b.TempDir())
	require.NoError(b, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	}()
	admin, err := minio.New(address, &minio.Options{
		Creds: credentials.NewStaticV4("user", "secret-secret", ""), Region: awsFirst})
	require.NoError(b, err)
	require.Eventually(b, func() bool {
		return admin.MakeBucket(b.Context(), "bucket", minio.MakeBucketOptions{}) == nil
	}, 30*time.Second, 50*time.Millisecond)

	e := export(b, randomBytes(1, 91_000_000))
	c := client(b, nil, remote.Config{Name: name, URL: "s3://bucket/p",
		Endpoint: "http://" + address, Connect: 2 * time.Second})
	e.publish(b, c)
	large := e.files["m.bin"]
	_, err = admin.PutObject(b.Context(), "bucket", "raw", bytes.NewReader(large),
		int64(len(large)), minio.PutObjectOptions{})
	require.NoError(b, err)

	dir := b.TempDir()
	b.Setenv("MC_CONFIG_DIR", filepath.Join(dir, "mc"))
	b.Setenv("MC_HOST_s", "http://user:secret-secret@"+address)
	b.Setenv("AWS_ACCESS_KEY_ID", "user")
	b.Setenv("AWS_SECRET_ACCESS_KEY", "secret-secret")
	b.Setenv("AWS_DEFAULT_REGION", awsFirst)
	out := filepath.Join(dir, "out")
	peers := map[string][]string{"mc": {filepath.Join(deps, "mc"), "cp", "-q", "s/bucket/raw", out},
		"aws": {filepath.Join(deps, "aws/bin/aws"), "s3", "cp", "--quiet", "--endpoint-url",
			"http://" + address, "s3://bucket/raw", out}}
	took := make(map[string][]time.Duration)
	measure := func(what string, do func()) {
		began := time.Now()
		do()
		took[what] = append(took[what], time.Since(began))
	}
	for range max(b.N, 5) { // one after the other, so that all have the same machine
		measure("pull", func() {
			f := remote.Fetch{Manifest: e.manifest,
				Files: []*os.File{temporary(b, nil), temporary(b, nil)}}
			_, err := c.Fetch(b.Context(), name, f)
			require.NoError(b, err)
			for i, file := range f.Files {
				require.NoError(b, file.Sync())
				raw, err := os.ReadFile(file.Name())
				require.NoError(b, err)
				require.EqualValues(b, e.layers[i].File.Hash, blake3.Sum256(raw))
			}
			remote.CloseAll(f.Files)
		})
		for peer, args := range peers {
			if _, err := os.Stat(args[0]); err != nil {
				continue
			}
			measure(peer, func() {
				said, err := exec.Command(args[0], args[1:]...).CombinedOutput()
				require.NoError(b, err, string(said))
				if peer == "mc" {
					require.NoError(b, exec.Command("sync", out).Run())
				}
			})
		}
	}
	median := func(what string) time.Duration {
		slices.Sort(took[what])
		return took[what][len(took[what])/2]
	}
	b.ReportMetric(float64(median("pull").Milliseconds()), "pull-ms")
	for peer := range peers {
		if len(took[peer]) == 0 {
			b.Logf("NOT MEASURED: there is no %s", peer)
			continue
		}
		b.ReportMetric(float64(median(peer).Milliseconds()), peer+"-ms")
		b.ReportMetric(float64(median("pull"))/float64(median(peer)), "pull/"+peer)
	}
}
