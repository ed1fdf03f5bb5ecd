"""Every error a user can meet, with the code agents branch on and the exit code scripts branch on.

GpuError
├── Failed            exit 1   it was tried and did not work
│   ├── Bug                    a defect of ours: traceback in the debug log
│   ├── RemoteError            the machine or the way to it
│   └── JobError               the user's own code
├── UsageError        exit 2   the call or a file is wrong: fix it and call again
│   ├── ConfigError
│   └── StateError
├── Refused           exit 3   a policy, mode or safety rule; nothing was done
├── ApprovalNeeded    exit 4   a human has to agree; the text to show is in the output
├── ProviderError     exit 5   the provider refused, has no capacity, or is unreachable
│   └── NotReady               a rented machine that is no use
└── Uncertain         exit 6   it may have happened: run the printed command

Levels follow what the caller can do next. A class is one code; codes belong to one exit each and are never reused.
"""

from __future__ import annotations

from typing import Any, ClassVar


class GpuError(Exception):
    """Base of all. Build with the template's fields as keywords; extra keywords go to `details` only.

    `next_step` may hold the same fields. Keep values printable: `one_line` escapes control characters.
    """

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    template: ClassVar[str] = "{message}"
    next_step: str = "gpu doctor"
    retryable: ClassVar[bool] = False
    may_be_billing: ClassVar[bool] = False

    def __init__(self, message: str | None = None, *, next_step: str | None = None, **details: Any):
        self.details = details
        if message is None:
            message = self.template.format(**details)
        self.message = one_line(message)
        step = next_step if next_step is not None else type(self).next_step
        try:
            step = step.format(**details)
        except (KeyError, IndexError, ValueError):
            pass
        self.next_step = one_line(step)
        super().__init__(self.message)

    def to_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "next_step": self.next_step,
            "retryable": self.retryable,
            "may_be_billing": self.may_be_billing,
            "details": self.details,
        }


def one_line(text: str, *, limit: int = 600) -> str:
    """Make foreign text safe for one terminal line: control characters escaped, long text cut in the middle."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(shown) > limit:
        shown = shown[: limit - 120] + " … " + shown[-110:]
    return shown


# exit 1 ------------------------------------------------------------------------------------------------------------


class Failed(GpuError):
    exit_code = 1


class Bug(Failed):
    code = "bug"
    template = "internal error: {message}"
    next_step = "run the same command with --debug and report the log it names"


class RemoteError(Failed):
    code = "remote_error"


class Unreachable(RemoteError):
    code, retryable = "unreachable", True
    template = "{host} did not answer: {reason}"
    next_step = "ssh {host} true"


class HostKeyMismatch(RemoteError):
    code = "host_key_mismatch"
    template = "the host key of {host} is {found}, pinned is {pinned}"
    next_step = "find out why it changed; if it is right, take the line of {machine} out of .pi/gpu/known_hosts"


class AuthFailed(RemoteError):
    code = "ssh_auth_failed"
    template = "{host} accepts none of our keys for user {user}: {reason}"
    next_step = "ssh {host} true"


class MachineLacks(RemoteError):
    code = "machine_lacks"
    template = "{host} has no {what}"
    next_step = "install {what} on {host} and run the command again"


class CommandFailed(RemoteError):
    code = "command_failed"
    template = "{what} failed on {host}: {reason}"


class ProtocolError(RemoteError):
    """The far end answered what its runner never says: a shell that prints, a broken proxy, or malice."""

    code = "unexpected_answer"
    template = "{host} answered something else than our runner: {reason}"
    next_step = "ssh {host} true"


class MachineDiskFull(RemoteError):
    code = "machine_disk_full"
    template = "the disk of {host} is full: {reason}"
    next_step = "free space on {host}, then run the command again; what was sent is kept"


class TransferIncomplete(RemoteError):
    code, retryable = "transfer_incomplete", True
    template = "the transfer stopped: {reason}"
    next_step = "run the same command again: it goes on where it stopped"


class HashMismatch(RemoteError):
    code, retryable = "hash_mismatch", True
    template = "{path} arrived changed: SHA-256 is {found}, expected {expected}"
    next_step = "run the same command again"


class UnsafeManifest(RemoteError):
    code = "unsafe_manifest"
    template = "{host} lists outputs that cannot be trusted: {reason}"
    next_step = "gpu job logs {job}"


class FuseMissing(RemoteError):
    """No process lives on the machine that would end its billing."""

    code, may_be_billing = "fuse_missing", True
    template = "nothing on machine {machine} would end its billing: no fuse lives there"
    next_step = "gpu machine destroy {machine}"


class FuseSilent(RemoteError):
    code, retryable, may_be_billing = "fuse_silent", True, True
    template = "the fuse of machine {machine} did not take the new deadline over; it still holds {deadline}"
    next_step = "run the same command again"


class ServiceUnreachable(RemoteError):
    """What serves the model took nothing in: the request may be sent again."""

    code, retryable = "service_unreachable", True
    template = "{service} does not answer: {reason}"
    next_step = "see whether it still starts or has ended, then run the command again"


class ServiceBusy(RemoteError):
    code, retryable = "service_busy", True
    template = "{service} takes no more requests now: {reason}"
    next_step = "wait {retry_after_s} s and run the command again"


class ServiceReply(RemoteError):
    """What serves the model answered something that its kind never answers, or not to the end."""

    code = "service_reply"
    template = "{service} answered {what} with something unexpected: {reason}"
    next_step = "read the log of the service"


class ServiceKeyRejected(RemoteError):
    code = "service_key_rejected"
    template = "{service} does not accept our key: {reason}"
    next_step = "give the key that the service was started with"


class OutputTooLarge(RemoteError):
    code = "output_too_large"
    template = "{name} is larger than the {limit} bytes that a run may leave"
    next_step = "ask for less, or raise the limit"


class JobError(Failed):
    code = "job_error"


class GenerationFailed(JobError):
    """The service took the request in and failed at it. details.node and node_class: where, in a workflow."""

    code = "generation_failed"
    template = "{service} failed at {what}: {reason}"
    next_step = "read the log of the service"


class GenerationInterrupted(JobError):
    code = "generation_interrupted"
    template = "{what} was interrupted on {service}"
    next_step = "run it again if that was not meant"


class GenerationLost(JobError):
    """Taken in, and then neither waiting, running nor done: the service was started again meanwhile."""

    code, retryable = "generation_lost", True
    template = "{service} no longer knows {what}: {reason}"
    next_step = "read the log of the service (out of memory?), then run the command again"


class GenerationTimeout(JobError):
    code = "generation_timeout"
    template = "{what} was not done on {service} within {timeout_s} s"
    next_step = "give it more time, or interrupt it: it may still run there"


class JobNotFound(JobError):
    code = "job_not_found"
    template = "no job {job} in this project"
    next_step = "gpu job ls"


class NoJobs(JobError):
    code = "no_jobs"
    template = "this project has no jobs yet"
    next_step = "gpu job run -- CMD"


class MissingProgram(Failed):
    code = "missing_program"
    template = "{program} is not installed here"
    next_step = "install {program}"


class EnvironmentFailed(Failed):
    code, retryable = "environment_failed", True
    template = "cannot make the Python environment: {reason}"
    next_step = "run the command again"


class DiskFull(Failed):
    code = "disk_full"
    template = "cannot write {path}: {reason}"
    next_step = "free some space and run the command again"


class NotWritable(Failed):
    code = "not_writable"
    template = "cannot write {path}: {reason}"
    next_step = "make it writable for this user, or choose another place"


class ArtifactMissing(Failed):
    code = "artifact_missing"
    template = "{uri} is not there"
    next_step = "gpu job artifacts --help"


class ArtifactChanged(Failed):
    """What is in the store, or was to go there, is not what the records say."""

    code = "artifact_changed"
    template = "{what} is not what is on record: {reason}"
    next_step = "gpu job pull --force, then push it again"


class UnsafeKey(Failed):
    code = "unsafe_key"
    template = "an object has a name that is used for nothing here, {key}: {reason}"
    next_step = "look at it with the store's own tools"


# exit 2 ------------------------------------------------------------------------------------------------------------


class UsageError(GpuError):
    code = "usage"
    exit_code = 2
    next_step = "gpu --help"


class ConfigError(UsageError):
    code = "config_invalid"
    template = "{file}: {problem}"
    next_step = "edit {file}"


class SchemaInvalid(UsageError):
    code = "schema_invalid"
    template = "{file}{at}: {problem}"
    next_step = "edit {file}"


class MissingCredential(UsageError):
    code = "missing_credential"
    template = "no credential for {provider}"
    next_step = "gpu login {provider}"


class NoProject(UsageError):
    code = "no_project"
    template = "no .pi/gpu in {directory} or above it"
    next_step = "gpu init"


class StateError(UsageError):
    """A record on disk is not what its schema allows. Reported, never mended silently."""

    code = "state_invalid"
    template = "{file}{at}: {problem}"
    next_step = "edit {file}, then: gpu doctor"


class InputInvalid(UsageError):
    """An input that the manifest does not allow; nothing was sent. details.problems: all of them."""

    code = "input_invalid"
    template = "{what}: {problem}"
    next_step = "correct the inputs and run the command again"


class WorkflowInvalid(UsageError):
    code = "workflow_invalid"
    template = "{what}: {problem}"
    next_step = "save it again in API format (in ComfyUI: Workflow, Export (API))"


class RequestRejected(UsageError):
    """The service refused a request before it did anything. details.problems: each with node, class and input."""

    code = "request_rejected"
    template = "{service} refuses {what}: {reason}"
    next_step = "correct the workflow or the inputs and run the command again"


class NotServed(UsageError):
    code = "not_served"
    template = "a model with runtime {runtime} {reason}"
    next_step = "see `runtime` in the model's manifest"


class PlanUnknown(UsageError):
    code = "plan_unknown"
    template = "there is no plan {plan}"
    next_step = "gpu plan --freeze"


class BucketMissing(UsageError):
    code = "bucket_missing"
    template = "{store} does not exist for this account: {reason}"
    next_step = "make the bucket, or name another one"


# exit 3 ------------------------------------------------------------------------------------------------------------


class Refused(GpuError):
    code = "refused"
    exit_code = 3


class ModeForbids(Refused):
    code = "mode_forbids"
    template = "{command} is not allowed in mode {mode}"
    next_step = "ask for mode {needed}, or leave it"


class StateNewer(Refused):
    code = "state_newer"
    template = "{file} was written by a newer version ({found}; this one knows {known}): reading only"
    next_step = "update gpu-skills"


class StateBusy(Refused):
    code, retryable = "state_busy", True
    template = "{file} is held by {holder} for more than {waited_s} s"
    next_step = "wait for it to end and run the command again"


class ChangedMeanwhile(Refused):
    code, retryable = "changed_meanwhile", True
    template = "{file} was changed by someone else meanwhile"
    next_step = "look at it and run the command again"


class PolicyMissing(Refused):
    code = "policy_missing"
    template = "{file} cannot be read: {reason}"
    next_step = "gpu init"


class OverCeiling(Refused):
    code = "over_ceiling"
    template = "{what} of {value} exceeds the {ceiling} ceiling of {limit}"
    next_step = "gpu policy show"


class SecretShaped(Refused):
    code = "secret_shaped"
    template = "these look like credentials and would be uploaded: {paths}"
    next_step = "exclude them in gpujob.yaml, or allow one by name: --allow-secret-file PATH"


class UploadTooLarge(Refused):
    code = "upload_too_large"
    template = "{bytes} bytes to upload, the limit is {limit}; largest: {largest}"
    next_step = "exclude data in gpujob.yaml and let the job download it"


class InputMissing(Refused):
    code = "input_missing"
    template = "required inputs would not be on the machine: {paths}"
    next_step = "create them or take them out of exclude"


class InputUnreadable(Refused):
    code = "input_unreadable"
    template = "these cannot be read: {paths}"
    next_step = "make them readable for this user, or exclude them in gpujob.yaml"


class UnsafeLink(Refused):
    code = "unsafe_link"
    template = "links that leave the directory: {paths}"
    next_step = "replace them with copies or exclude them in gpujob.yaml"


class NotCollected(Refused):
    code = "not_collected"
    template = "outputs not collected: {jobs}"
    next_step = "gpu job pull"


class JobRunning(Refused):
    code = "job_running"
    template = "job {job} is running"
    next_step = "gpu job cancel {job}"


class DeploymentNotReady(Refused):
    code = "deployment_not_ready"
    template = "deployment {deployment} is {status}; only a ready one is given requests"
    next_step = "gpu deployment show {deployment}"


class AlreadyEnded(Refused):
    code = "already_ended"
    template = "{job} has already ended ({state}); a job ends once"
    next_step = "gpu job status {job}"


class NetworkDenied(Refused):
    code = "network_denied"
    template = "the operating system refuses this process the network ({reason}); nothing was sent"
    next_step = "read docs/external-access.md"


class PlanRefused(Refused):
    """reasons: all of them, each {code, message}; the first code is what to branch on when there is one only."""

    code = "plan_refused"
    template = "{summary}"
    next_step = "change gpu.yaml or the flags, then run gpu plan again"


class Unguarded(Refused):
    """The machine's own key is not proven to end billing on this account, so the second layer has to be there."""

    code = "sentinel_missing"
    template = "no machine is made on {provider} before the sentinel passed: {reason}"
    next_step = "gpu sentinel --provider {provider}"


class Protected(Refused):
    code = "machine_protected"
    template = "machine {machine} is protected"
    next_step = "gpu machine protect {machine} --off"


# exit 4 ------------------------------------------------------------------------------------------------------------


class ApprovalNeeded(GpuError):
    code = "approval_missing"
    exit_code = 4


class PlanChanged(ApprovalNeeded):
    code = "plan_changed"
    template = "plan {plan} does not say what it said when it was frozen"
    next_step = "gpu plan --freeze"


class ApprovalExpired(ApprovalNeeded):
    code = "approval_expired"
    template = "{reason}"
    next_step = "gpu plan --freeze"


class ApprovalUsed(ApprovalNeeded):
    code = "approval_used"
    template = "{reason}"
    next_step = "gpu plan --freeze"


class ApprovalInvalid(ApprovalNeeded):
    code = "approval_invalid"
    template = "{reason}"
    next_step = "gpu approve --show {plan}"


# exit 5 ------------------------------------------------------------------------------------------------------------


class ProviderError(GpuError):
    code = "provider_error"
    exit_code = 5


class NoCapacity(ProviderError):
    code = "no_capacity"
    template = "{message}"


class CannotSatisfy(ProviderError):
    code = "cannot_satisfy"
    template = "{provider} has {found}, the project needs {wanted}"
    next_step = "gpu init --provider PROVIDER, or lower compute.min_vram_gb in gpu.yaml"


class Unavailable(ProviderError):
    code, retryable = "unavailable", True


class NoOffers(ProviderError):
    """details.filters: each filter in order, how many offers it removed and how many were left."""

    code = "no_offers"
    template = "no offer fits: {filters_text}"
    next_step = "loosen the filter that removed most, then: gpu offers"


class AuthRejected(ProviderError):
    code = "auth_rejected"
    template = "{provider} does not accept the key from {source}: {reason}"
    next_step = "gpu login {provider}"


class OtherAccount(ProviderError):
    """Not the account that something was rented in: what it does not show may be there all the same."""

    code = "other_account"
    template = "{what} was rented in another {provider} account than the one of the key in use: it may bill there"
    next_step = "gpu login {provider}"
    may_be_billing = True


class InsufficientBalance(ProviderError):
    code = "insufficient_balance"
    template = "{provider} says the account has not enough credit: {reason}"
    next_step = "add credit at {provider}"


class RateLimited(ProviderError):
    code, retryable = "rate_limited", True
    template = "{provider} limits how often it is asked ({what}): {reason}"
    next_step = "wait {retry_after_s} s and run the command again"


class UnexpectedReply(ProviderError):
    """What a provider answered is not what its documentation says. Nothing is concluded from it."""

    code = "unexpected_reply"
    template = "{provider} answered {what} with something unexpected: {reason}"


class ProviderSchema(ProviderError):
    """The provider calls our request malformed: repeating it, here or elsewhere, helps nobody."""

    code = "provider_schema"
    template = "{provider} does not understand our request ({what}): {reason}"
    next_step = "run the same command again with --debug and report the log it names"


class DiskUnspecified(ProviderError):
    code = "disk_unspecified"
    template = "{provider} finds no machine with {disk_gb} GB of free disk: {reason}"
    next_step = "lower compute.disk_gb in gpu.yaml, then: gpu offers"


class InstanceAbsent(ProviderError):
    code = "instance_absent"
    template = "{provider} knows no instance {instance_id}"
    next_step = "gpu status"


class ConflictingState(ProviderError):
    """The instance is in a state in which this cannot be asked: look at it again, then decide again."""

    code, retryable = "conflicting_state", True
    template = "{provider} cannot {what} {instance_id} now: {reason}"
    next_step = "gpu status"


class HostFull(ProviderError):
    code = "host_full"
    template = "{machine} cannot start: the host it is bound to has no free GPU ({reason})"
    next_step = "wait, or plan a replacement and copy the data over: nothing is rented by itself"


class CreatedPriceMismatch(ProviderError):
    code, may_be_billing = "created_price_mismatch", True
    template = "{machine} is not what was asked for: {reason}"
    next_step = "gpu status"


class NotReady(ProviderError):
    """A rented machine that did not become usable. details.attempts: what was tried, each with its reason."""

    code = "machine_not_ready"
    template = "{machine} did not become usable ({what}): {reason}"
    next_step = "gpu reconcile"


class ArchUnsupported(NotReady):
    """The image's own libraries have no code for this GPU: another machine of the kind would do no better."""

    code = "arch_unsupported"
    template = "{machine}: {reason}"
    next_step = "use an image whose PyTorch is {wheel}, then: gpu plan --freeze"


class NotOwned(Refused):
    code = "not_owned"
    template = "{machine} does not carry our label (it has {label}): it is not ours to change"
    next_step = "gpu status"


class AlreadyGone(Refused):
    code = "machine_already_gone"
    template = "machine {machine} is {status}"
    next_step = "gpu machine ls"


class DestinationRefused(Refused):
    """A key may only go where it belongs. Nothing was sent."""

    code = "destination_refused"
    template = "{provider}: nothing is sent to {base_url}: {reason}"
    next_step = "unset {variable}"


class StoreIgnoresConditions(Refused):
    """Two writers could both believe that they won there."""

    code = "store_ignores_conditions"
    template = "{store} does not keep to conditional writes ({reason}): nothing is stored there"
    next_step = "use a store that knows If-None-Match and If-Match, such as S3, R2 or SeaweedFS"


class DestroyNotTaken(ProviderError):
    """The provider did not take the delete so far. It stays on record as wanted, and every later command asks again."""

    code, retryable, may_be_billing = "destroy_not_taken", True, True
    template = "{provider} did not take the delete of {machine}: {reason}; it is still there and bills"
    next_step = "gpu reconcile"


# exit 6 ------------------------------------------------------------------------------------------------------------


class Uncertain(GpuError):
    exit_code = 6
    code = "uncertain"


class OutcomeUnknown(Uncertain):
    code = "outcome_unknown"
    template = "{what} was sent to {host} and the answer never came"
    next_step = "gpu job status {job}"


class GenerationUnknown(Uncertain):
    """Sent, not answered, and not found at the service. It is looked for by its id before it is sent again."""

    code, retryable = "generation_unknown", True
    template = "{what} was sent to {service} and the answer never came: {reason}"
    next_step = "run the same command again: it is looked for first where the service can tell"


class ProviderSilent(Uncertain):
    """A write was sent to a provider and no usable answer came: it may have happened."""

    code, may_be_billing = "provider_silent", True
    template = "{provider} gave no clear answer to {what}: {reason}; it may have happened"
    next_step = "gpu reconcile"


class StoreSilent(Uncertain):
    """A conditional write was sent to a store and no clear answer came."""

    code = "store_silent"
    template = "{store} gave no clear answer to the write of {key}: {reason}; it may be there"
    next_step = "run the same command again: it looks first"


class TeardownIncomplete(Uncertain):
    code, may_be_billing = "teardown_incomplete", True
    template = "{machines}: deleted, and not yet proven absent"
    next_step = "gpu reconcile"


class StopFailed(Uncertain):
    code, may_be_billing = "stop_failed", True
    template = "{machine} does not show as stopped: {reason}; it counts as burning"
    next_step = "gpu reconcile"


class MachinePending(Uncertain):
    """An earlier command asked for it, stopped it or let it go, and it is not known how that ended."""

    code, may_be_billing = "machine_pending", True
    template = "machine {machine} is {status}"
    next_step = "gpu reconcile"


# exit codes of `gpu job run` that are not ours to choose
EXIT_GPU_FAILED = 125  # every failure of gpu itself; the class is in the JSON and on the last stderr line
EXIT_TIMEOUT = 124
EXIT_CANCELLED = 130


def all_errors() -> list[type[GpuError]]:
    """Every class of the tree, parents before children."""
    found: list[type[GpuError]] = []

    def walk(cls: type[GpuError]) -> None:
        found.append(cls)
        for child in cls.__subclasses__():
            walk(child)

    walk(GpuError)
    return found
