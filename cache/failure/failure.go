// Package failure classifies and words failed compiles, and is the negative cache of them.
//
// A Failure is made of what a worker or a compiler left (Of, OfLoad, OfOutput): its Reason decides
// the advice to users, whether the model may be the cause, and when a request may retry.
// Only failures that the model may cause are remembered. Remembered is safe for concurrent use.
// Start reading at Of.
package failure

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/epcached/epcached/cas"
	"github.com/epcached/epcached/compilers"
	"github.com/epcached/epcached/epmodel"
	"github.com/epcached/epcached/index"
	"github.com/epcached/epcached/internal/apierr"
	"github.com/epcached/epcached/internal/modelname"
)

// Reason is the class of a compile's failure. Its words are the protocol's.
type Reason string

// The reasons.
const (
	// a signal that the compiler brought upon itself, or an end without a result
	Crash       Reason = "crash"
	Timeout     Reason = "timeout"
	CPU         Reason = "processor time"
	Memory      Reason = "memory"
	OutputLimit Reason = "output limit"
	Refused     Reason = "refused" // by ONNX Runtime or the execution provider, with a code
	NoNode      Reason = "no node taken"
	Invalid     Reason = "invalid output"
	LoadCheck   Reason = "load check failed"
	Cancelled   Reason = "cancelled"
	WorkerDied  Reason = "worker died" // killed from outside, twice
	NoWorker    Reason = "worker not started"
	Sandbox     Reason = "sandbox" // not even the smallest model compiles and loads in a worker
)

// Failure is a compile that failed. Every user of the model may see it: it names no file or user.
type Failure struct {
	RequestKey  index.RequestKey
	BuildKey    index.BuildKey
	ModelName   string
	ModelDigest cas.Digest
	EP          string
	Scope       string
	UID         uint32 // the user of the first request

	Reason Reason
	Text   string // ends with the compiler's own last words
	// "reason", and as the case may be "signal", "code", "exit", "stderr", "logged",
	// "free_dimensions"
	Facts map[string]string
	Hint  string // what to do, if more is known than by the reason

	Count       int // how often in a row
	First, Last time.Time
	Retry       time.Time // when a request may try again
}

// maxLastWords bounds a compiler's standard error, and a failure's text, because many are kept.
const maxLastWords = 4 << 10

// Of gives a compile's error its reason; nil says that it is no failure of a compile's. log is what
// the worker printed.
func Of(err error, log string) *Failure {
	f := &Failure{Text: err.Error(), Facts: make(map[string]string)}
	var refused *compilers.RefusedError
	var exit *compilers.ExitError
	var none *compilers.NoNodesError
	switch {
	case errors.As(err, &none):
		f.Reason = NoNode
		if len(none.Errors) > 0 {
			f.Facts["logged"] = lastPart(strings.Join(none.Errors, "\n"))
			f.Hint = "correct the error that ONNX Runtime logged; epcachectl doctor tests the " +
				"execution provider again"
		}
	case errors.Is(err, compilers.ErrStart):
		f.Reason = NoWorker
	case errors.As(err, &refused):
		f.Reason, f.Facts["code"] = cmp.Or(limitInOutput(refused.Text), Refused),
			fmt.Sprint(refused.Code)
		if refused.Doing == "compile" { // as every failure of a compile says
			f.Text = strings.Replace(f.Text, refused.Error(), refused.Cause(), 1)
		}
	case errors.As(err, &exit):
		f.setExit(exit)
		log = exit.Stderr
	default:
		if f.Reason = limitReason(err); f.Reason == "" {
			return nil
		}
		if line := compilers.LastLine(log); line != "" {
			f.Text += ": " + line
		}
	}
	f.Facts["reason"] = string(f.Reason)
	if log != "" {
		f.Facts["stderr"] = lastPart(log)
	}
	f.Text = lastPart(f.Text)
	return f
}

func (f *Failure) setExit(exit *compilers.ExitError) {
	f.Facts["exit"] = fmt.Sprint(exit.Code)
	if exit.Signal != "" {
		f.Facts["signal"] = exit.Name
	}
	if exit.IsExternalSignal() {
		f.Reason = WorkerDied
		return
	}
	// The kernel gives a process no more than its limit, and that gives up.
	f.Reason = cmp.Or(limitInOutput(compilers.LastLine(exit.Stderr)), Crash)
}

// limitReason is for what the worker did not say itself: limits, and output that is none.
func limitReason(err error) Reason {
	for _, one := range []struct {
		is     error
		reason Reason
	}{
		{compilers.ErrTimeout, Timeout}, {compilers.ErrCPU, CPU}, {compilers.ErrMemory, Memory},
		{compilers.ErrOutputLimit, OutputLimit}, {compilers.ErrOutput, Invalid},
		{compilers.ErrProtocol, Invalid}, {context.Canceled, Cancelled},
	} {
		if errors.Is(err, one.is) {
			return one.reason
		}
	}
	if errors.As(err, new(*epmodel.FormatError)) {
		return Invalid
	}
	return ""
}

// limitMessages are messages of C, C++, Python and the system when memory or space is refused.
var limitMessages = []struct {
	reason Reason
	words  []string
}{
	{Memory, []string{"std::bad_alloc", "bad allocation", "MemoryError", "ENOMEM",
		"cannot allocate memory", "unable to allocate", "out of memory"}},
	{OutputLimit, []string{"EFBIG", "file too large", "ENOSPC", "no space left on device", "EDQUOT",
		"disk quota exceeded", "EMFILE", "too many open files"}},
}

// limitInOutput returns the limit of the worker that a program's message reports; "": none.
func limitInOutput(words string) Reason {
	words = strings.ToLower(words)
	for _, one := range limitMessages {
		for _, said := range one.words {
			if strings.Contains(words, strings.ToLower(said)) {
				return one.reason
			}
		}
	}
	return ""
}

// lastPart is the end of a text, which is where its point is, as valid UTF-8.
func lastPart(text string) string {
	text = strings.TrimSpace(text)
	if len(text) > maxLastWords {
		text = "[...]" + text[len(text)-maxLastWords:]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// ToError returns the error of a request, as formatted: text, class, facts and hint.
func (f *Failure) ToError(cause error, format string, args ...any) *apierr.Error {
	e := apierr.New(cmp.Or(meanings[f.Reason].class, apierr.CompileFailed), nil, format, args...)
	e.Text += ": " + f.Text
	e.Err = &failed{f, cause}
	for key, value := range f.Facts {
		e.WithFact(key, value)
	}
	e.Hint = f.Advice()
	return e
}

// failed is the cause of a refusal that is a compile's failure.
type failed struct {
	*Failure       // shared: read only
	cause    error // may be nil
}

func (f *failed) Error() string { return f.Text }

func (f *failed) Unwrap() error { return f.cause }

// FromError returns the compile's failure that an error wraps, nil for other errors.
func FromError(err error) *Failure {
	var e *apierr.Error
	if !errors.As(err, &e) {
		return nil
	}
	// and not further down: an error wrapped deeper is not the reported one
	if f, ok := e.Err.(*failed); ok {
		return f.Failure
	}
	return nil
}

// AddHint adds a hint to those that the failure has already.
func (f *Failure) AddHint(hint string) {
	if f.Hint != "" {
		f.Hint += "; or "
	}
	f.Hint += hint
}

// Advice is everything that can be done about it.
func (f *Failure) Advice() string {
	usual := meanings[f.Reason].hint
	if f.Hint == "" || usual == "" {
		return f.Hint + usual
	}
	return f.Hint + "; or " + usual
}

// meanings are what the reasons mean where that is not the usual.
var meanings = map[Reason]struct {
	hint       string
	class      apierr.Class // 0: CompileFailed
	notOfModel bool
	ofProvider bool
}{
	"":          {notOfModel: true},
	Cancelled:   {class: apierr.Cancelled, notOfModel: true},
	NoWorker:    {hint: hintMachine, class: apierr.Unavailable, notOfModel: true},
	Sandbox:     {hint: hintMachine, class: apierr.Unavailable, notOfModel: true},
	Crash:       {hint: hintCrash, ofProvider: true},
	NoNode:      {hint: hintNoNode, ofProvider: true},
	Refused:     {ofProvider: true},
	Invalid:     {ofProvider: true},
	LoadCheck:   {ofProvider: true},
	Timeout:     {hint: hintLimits},
	CPU:         {hint: hintLimits},
	Memory:      {hint: hintLimits},
	OutputLimit: {hint: hintLimits},
}

const (
	hintNoNode = "use the model as it is: load it without epcached, " +
		"or choose another execution provider"
	hintCrash = "the daemon is not affected, but an application that loads the model with this " +
		"execution provider may crash too: choose another provider or other options"
	hintLimits  = "[limits] in the daemon's configuration sets the bounds of a compile"
	hintMachine = "the fault may be the machine's and not the model's; epcachectl doctor looks " +
		"for it"
)

// BlamesModel reports whether the model may be the cause, and not the machine or the request.
func (r Reason) BlamesModel() bool { return !meanings[r].notOfModel }

// BlamesProvider reports whether the execution provider fails so wherever it runs: an application
// that has the same one fares no better by compiling itself. Limits are the daemon's own.
func (r Reason) BlamesProvider() bool { return meanings[r].ofProvider }

// OfLoad is for what compiles and then does not load.
func OfLoad(checked compilers.CheckResult) *Failure {
	f := &Failure{Reason: LoadCheck, Text: lastPart("the compiled model does not load: " +
		"" + checked.Cause()),
		Facts: map[string]string{"reason": string(LoadCheck), "code": fmt.Sprint(checked.Code)}}
	if checked.Signal != "" {
		f.Facts["signal"] = checked.Signal
	}
	return f
}

// OfOutput is for output that is no artefact.
func OfOutput(err error) *Failure {
	return &Failure{Reason: Invalid, Text: lastPart("the execution provider's output is not a " +
		"valid compiled model: " + err.Error()),
		Facts: map[string]string{"reason": string(Invalid)}}
}

// OfMachine replaces a failure that is not the model's.
func OfMachine(text string) *Failure {
	return &Failure{Reason: Sandbox, Text: lastPart(text),
		Facts: map[string]string{"reason": string(Sandbox)}}
}

// ModelPlaceholder replaces, in a failure's text, the path of the model that the compiler printed.
// As replaces it by each user's own name.
const ModelPlaceholder = "\uFFFC"

// CompilerWordFacts are the facts that are a compiler's own words, and may name the model.
var CompilerWordFacts = []string{"stderr", "logged"}

// ForName returns the failure for a user that gives the model this name.
func (f *Failure) ForName(name string) *Failure {
	out := *f
	out.ModelName = name
	out.Text = strings.ReplaceAll(f.Text, ModelPlaceholder, name)
	out.Facts = maps.Clone(f.Facts)
	for _, fact := range CompilerWordFacts {
		if words := f.Facts[fact]; words != "" {
			out.Facts[fact] = strings.ReplaceAll(words, ModelPlaceholder, name)
		}
	}
	return &out
}

// RenamedError is the error that a user gets for a failed job, which may have been begun by another
// with another name for the model.
func RenamedError(e *apierr.Error, name string) *apierr.Error {
	f, ok := e.Err.(*failed)
	if !ok || name == f.ModelName {
		return e
	}
	head, ok := strings.CutSuffix(e.Text, f.ForName(f.ModelName).Text)
	if !ok {
		return e
	}
	own, renamed := *e, f.ForName(name)
	own.Err = &failed{renamed, f.cause}
	own.Text = strings.Replace(head, strconv.Quote(f.ModelName), strconv.Quote(name), 1) +
		renamed.Text
	own.Facts = maps.Clone(e.Facts)
	maps.Copy(own.Facts, renamed.Facts)
	return &own
}

// MissError is the error of a request that wants no compile, and would not get one either.
func (f *Failure) MissError(model string) *apierr.Error {
	e := f.RememberedError(model)
	e.Class, e.Text = apierr.NotFound,
		fmt.Sprintf("no build for model %q, which does not compile (%s): %s", model,
			f.history(), f.Text)
	return e
}

// RememberedError is the error of a request that is answered from memory.
func (f *Failure) RememberedError(model string) *apierr.Error {
	e := f.ToError(nil, "model %q does not compile (%s)", model, f.history())
	e.WithFact("request_key", f.RequestKey.String()).WithFact("failed", fmt.Sprint(f.Count)).
		WithFact("last_at", f.Last.UTC().Format(time.RFC3339)).
		WithFact("retry_at", f.Retry.UTC().Format(time.RFC3339))
	retry := "to retry now: epcachectl jobs retry " + f.RequestKey.String()[:16]
	if e.Hint != "" {
		retry = e.Hint + "; " + retry
	}
	return e.WithHint("%s", retry)
}

func (f *Failure) history() string {
	times := "failed once"
	if f.Count > 1 {
		times = fmt.Sprintf("failed %d times", f.Count)
	}
	return fmt.Sprintf("%s, last at %s, not retried before "+
		"%s", times, f.Last.UTC().Format(time.RFC3339), f.Retry.UTC().Format(time.RFC3339))
}

// Means reports whether a name means the failure, as one means a build.
func (f *Failure) Means(name string) bool {
	if modelname.Matches(f.ModelName, name) {
		return true
	}
	if len(name) < index.MinPrefix {
		return false
	}
	for _, id := range []string{f.RequestKey.String(), f.BuildKey.String(),
		f.ModelDigest.String()} {
		if strings.HasPrefix(id, name) {
			return true
		}
	}
	return false
}

// Line is the failure in one line.
func (f *Failure) Line() string {
	return fmt.Sprintf("it does not compile (%s): %s", f.history(), f.Text)
}
