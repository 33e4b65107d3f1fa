package standin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
)

// Check implements compilers.Compiler. A compiled graph fails, with ORT's code for an invalid
// graph, when the graph or its binary are not as written, were made by another major version or for
// other hardware, or when the graph is in a later format.
func (c *Compiler) Check(ctx context.Context,
	job compilers.CheckJob) (compilers.CheckResult, error) {
	if err := await(ctx, job.Ready); err != nil {
		return compilers.CheckResult{}, err
	}
	if job.Against != "" {
		c.LoadComparisons.Add(1)
	} else {
		c.Checks.Add(1)
	}
	start := time.Now()
	if len(job.EPs) == 0 {
		return compilers.CheckResult{}, fmt.Errorf("check %q: no EP", job.Graph)
	}
	sdk, err := sdkOf(job.Runtime, job.EPs[0])
	if err != nil {
		return compilers.CheckResult{}, err
	}
	if c.CheckFault != nil {
		if result := c.CheckFault(job); result != nil {
			return *result, nil
		}
	}
	result := compilers.CheckResult{Outcome: compilers.Passed,
		GraphOptimizationLevel: job.GraphOptimizationLevel}
	for i, graph := range append([]string{job.Graph}, job.Share...) {
		if err = load(ctx, graph, sdk, irVersion(job.Runtime)); err != nil {
			result.Member = i
			break
		}
	}
	if err == nil && job.Against != "" {
		result.LoadCPU, result.AgainstCPU = c.LoadCPU, c.AgainstCPU
		err = loadSource(ctx, job.Against)
	}
	if err != nil {
		result.Outcome, result.Code, result.Text = compilers.Failed, 10, err.Error()
	}
	result.Seconds = time.Since(start).Seconds()
	return result, nil
}

// loadSource does not compile, which a real EP would: it only reads.
func loadSource(ctx context.Context, path string) error {
	graph, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	_, err = epmodel.Read(ctx, filepath.Base(path), bytes.NewReader(graph))
	return err
}

func load(ctx context.Context, path string, sdk SDK, ir int64) error {
	graph, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	model, err := epmodel.Read(ctx, filepath.Base(path), bytes.NewReader(graph))
	if err != nil {
		return err
	}
	if model.IRVersion > ir {
		return fmt.Errorf("unsupported model IR version: %d, max supported IR version: %d",
			model.IRVersion, ir)
	}
	if len(model.Contexts) != 1 || model.Contexts[0].Source != EP {
		return fmt.Errorf("%s: not one node of %s", filepath.Base(path), EP)
	}
	node := model.Contexts[0]
	var context []byte
	if node.EmbedMode == 0 {
		context, err = os.ReadFile(filepath.Join(filepath.Dir(path), node.CacheContext))
		if err != nil {
			return err
		}
	} else {
		context = graph[node.Inline.Offset : node.Inline.Offset+node.Inline.Length]
	}
	return sound(context, sdk)
}

// sound checks a context binary's own digest and the target it was made for. Real EPs check less.
func sound(context []byte, sdk SDK) error {
	header, body, found := bytes.Cut(context, []byte("\n"))
	if !found || string(header) != fmt.Sprintf("standin %x", sha256.Sum256(body)) {
		return fmt.Errorf("context binary is damaged")
	}
	info, _, _ := bytes.Cut(body, []byte("\n"))
	if sdk.verdict(string(info)) == compilers.Unsupported {
		return fmt.Errorf("context binary of %s does not load with %s", info, sdk.compatibility())
	}
	return nil
}
